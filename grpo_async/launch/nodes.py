"""The other nodes of a run on a Ray cluster, as the supervisor on the node with rank 0 sees them (RayNodes), and what runs there
(NodeActor): see launch.ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import queue
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_async import __version__
from grpo_async.checks.config_checks import check_node
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display, View
from grpo_async.display.progress import Progress
from grpo_async.errors import ConfigError, DeadlineError, GrpoAsyncError, RunError
from grpo_async.launch.gpus import gpus_of_a_server
from grpo_async.launch.node import GRACE_S, NodeProcesses
from grpo_async.launch.plan import own_urls, plan_processes
from grpo_async.launch.reaper import private_folder
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.heartbeat import Report
from grpo_async.processes.machine import free_ports
from grpo_async.run_directory import attempt_config
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.concurrency import in_background
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.safe_text import plain

POLL_S = 0.5


class StoppedError(RunError):
    """A signal came before anything was started."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} before the run had started")
        self.exit_code = 130 if number is signal.SIGINT else 143


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an actor is."""

    host: str
    address: str
    port: int
    """A free one."""
    engine: EngineChoice
    versions: Mapping[str, str]


@dataclass(slots=True)
class _Remote:
    """One NodeActor: what it is for, and where it is, as soon as that is known."""

    name: str
    actor: Any
    described: Any
    place: Place | None = None

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name} ({plain(self.place.host)}, {self.place.address})"


class RayNodes:
    """The other nodes of a run, as its supervisor sees them.

    Attributes:
        trouble: set as soon as the run cannot continue because of another node; `failure` says why.
        has_lost_a_node: `failure` is that a node that trains is gone, which explains every failure of a rank.
    """

    def __init__(
        self,
        places: Any,
        bundle: Mapping[str, int],
        directory: str,
        variables: Mapping[str, str],
        stopped: Sequence[signal.Signals],
    ) -> None:
        self._lead_actor = ray.get_runtime_context().current_actor
        self._places, self._bundle = places, bundle
        self._directory, self._variables = directory, variables
        self._stopped = stopped
        self._trainers: dict[int, _Remote] = {}
        self._servers: dict[int, _Remote] = {}
        self._moves: dict[int, int] = {}
        self._running: set[int] = set()
        self._local: NodeProcesses | None = None
        self._ending = asyncio.Event()
        self._changed = asyncio.Event()
        self.trouble = asyncio.Event()
        self.failure: str | None = None
        self.has_lost_a_node = False

    # ---- before the run ----

    def gather(
        self, config: ExperimentConfig, engine: EngineChoice, assignment: Assignment, token: str | None
    ) -> Assignment:
        """Wait for the other nodes that train and for as many servers as the run needs; returns the assignment with all addresses.

        Raises:
            ConfigError: a node lacks something.
            DeadlineError: the cluster has no room within `launch.placement_timeout_s`.
            StoppedError: a signal came.
        """
        self._config, self._engine, self._token = config, engine, token
        self._attempt = attempt_config(assignment.attempt_dir)
        inference, launch = config.inference, config.launch
        for rank in range(1, launch.trainer_nodes):
            actor = place_actor(NodeActor, self._places, rank, self._bundle).remote(self._directory, self._variables)
            described = actor.describe.remote(config, self._attempt, trains=True)
            self._trainers[rank] = _Remote(f"trainer node {rank}", actor, described)
        num_servers = 0 if inference.urls else inference.max_replicas
        for index in range(num_servers):
            self._place_server(index)
        remotes = list(self._trainers.values())
        self._wait_for([each.described for each in remotes], len(remotes), "the other machines that train")
        servers = [self._servers[index].described for index in range(num_servers)]
        self._wait_for(servers, 0 if inference.urls else inference.min_replicas, "room for the servers")
        for each in (*remotes, *self._servers.values()):
            if ray.wait([each.described], timeout=0.0)[0]:
                try:
                    self._locate(each)
                except RayActorError:
                    raise RunError(f"{each} was lost before the run began") from None
        urls = tuple(self._url(each) for _, each in sorted(self._servers.items()))
        address = ray.util.get_node_ip_address()
        node = Node(count=launch.trainer_nodes, address=address, port=free_ports(address, 1)[0], own_address=address)
        return assignment.model_copy(update={"node": node, "server_urls": urls})

    def _place_server(self, index: int) -> None:
        """Ask Ray for a place for a server, on any node."""
        gpus = gpus_of_a_server(self._config, self._engine)
        options = {"num_gpus": gpus, "num_cpus": 1 if gpus else self._config.inference.threads}
        actor = ray.remote(NodeActor).options(**options, max_concurrency=16, scheduling_strategy="SPREAD")
        handle = actor.remote(self._directory, self._variables)
        described = handle.describe.remote(self._config, self._attempt, trains=False)
        self._servers[index] = _Remote(f"inference server {index}", handle, described)

    def _wait_for(self, described: Sequence[Any], number: int, what: str) -> None:
        timeout_s = self._config.launch.placement_timeout_s
        ends_at = time.monotonic() + timeout_s
        while number and len(ray.wait(list(described), num_returns=number, timeout=POLL_S)[0]) < number:
            if self._stopped:
                raise StoppedError(self._stopped[0])
            if time.monotonic() > ends_at:
                raise DeadlineError(
                    what,
                    waited_s=timeout_s,
                    setting="launch.placement_timeout_s",
                    hint=f"Free in the cluster: {described_resources(ray.available_resources())}, see `ray status`.",
                )

    def _locate(self, remote: _Remote) -> None:
        """Read where an actor is.

        Raises:
            ConfigError: that node lacks something.
            RayActorError: it is gone.
        """
        try:
            place: Place = ray.get(remote.described)
        except RayTaskError as error:
            if isinstance(error.cause, GrpoAsyncError):
                raise ConfigError(f"{remote.name}: {error.cause}") from None
            raise
        remote.place = place
        others = [
            f"{name} {here} -> {place.versions[name]}"
            for name, here in _versions().items()
            if place.versions[name] != here
        ]
        if others:
            raise ConfigError(
                f"{remote}: other versions are installed than on the node with rank 0: {', '.join(others)}"
            )
        if place.engine.engine != self._engine.engine:
            raise ConfigError(
                f"{remote} would serve with {place.engine.engine}, and the node with rank 0 with {self._engine.engine}; set "
                "inference.engine"
            )

    def _url(self, remote: _Remote) -> str:
        if remote.place is None:
            return ""
        return own_urls(self._config, remote.place.address, ports=[remote.place.port])[0]

    # ---- during the run ----

    @asynccontextmanager
    async def running(self, local: NodeProcesses, assignment: Assignment) -> AsyncIterator[None]:
        """Let the other nodes run while the context is open."""
        self._loop, self._local, self._assignment = asyncio.get_running_loop(), local, assignment
        if self._stopped:
            local.signals.take(self._stopped[0])
        self._running = set(self._trainers)
        parts = [self._keep_trainer(rank) for rank in self._trainers]
        parts += [self._keep_server(index) for index in self._servers]
        async with AsyncExitStack() as stack:
            tasks = [await stack.enter_async_context(in_background(part, name="watch a node")) for part in parts]
            try:
                yield
            finally:
                self._ending.set()
                remotes = [*self._trainers.values(), *self._servers.values()]
                for remote in remotes:
                    remote.actor.receive.remote({"kind": "end", "saves": self.failure is None})
                placed = [task for task, remote in zip(tasks, remotes, strict=True) if remote.place is not None]
                if placed:
                    await asyncio.wait(placed, timeout=2 * GRACE_S)

    async def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until the trainer of every node has ended, or the node is gone, `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._running:
                    self._changed.clear()
                    await self._changed.wait()

    def name_of(self, rank: int) -> str:
        """Name of a node that trains, for messages."""
        return str(self._trainers[rank])

    def tell_server(self, index: int, message: Mapping[str, Any]) -> None:
        """Pass on what the trainer says of a server."""
        if index in self._servers:
            self._servers[index].actor.receive.remote(dict(message))

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle what another node reports; from any thread."""
        if self._local is not None:
            self._loop.call_soon_threadsafe(self._take, message)

    def kill(self) -> None:
        """End every actor; their processes die with them."""
        for remote in (*self._trainers.values(), *self._servers.values()):
            ray.kill(remote.actor)

    def _take(self, message: Mapping[str, Any]) -> None:
        local = self._local
        assert local is not None
        match message:
            case {"kind": "signal", "number": number}:
                local.signals.take(number)
            case {"kind": "note", "text": str(text)}:
                local.display.note(text)
            case {"kind": "warning", "text": str(text)}:
                local.display.warning(text)
            case {"kind": "server_event", "index": int(index), "event": str(event)}:
                fields = {name: message[name] for name in ("detail", "num_restarts")}
                local.tell_trainer(index=index, event=event, **fields)
                if event == "given_up":
                    local.mark_lost(index, f"{self._servers[index]}: {message['detail']}")
            case _:
                local.display.unknown_message("another node", message)

    async def _run(self, remote: _Remote, assignment: Assignment, **options: Any) -> NodeEnd:
        reference = remote.actor.run.remote(
            self._lead_actor, self._config, self._engine, assignment, self._token, **options
        )
        end: NodeEnd = await asyncio.wrap_future(reference.future())
        return end

    async def _keep_trainer(self, rank: int) -> None:
        remote, local = self._trainers[rank], self._local
        assert local is not None
        assert remote.place is not None
        node = self._assignment.node.model_copy(update={"rank": rank, "own_address": remote.place.address})
        try:
            end = await self._run(remote, self._assignment.model_copy(update={"node": node}), trains=True)
            local.watcher.reports += end.reports
            if end.error is not None:
                self._fail(f"the trainer of {remote} failed: {plain(end.error)}")
        except RayActorError:
            if not self._ending.is_set():
                self.has_lost_a_node = True
                self._fail(f"{remote} is gone: the machine or the network failed, or its processes were killed")
        finally:
            self._running.discard(rank)
            self._changed.set()

    async def _keep_server(self, index: int) -> None:
        """Let a server run, wherever there is room for it, until it is given up."""
        local = self._local
        assert local is not None
        while not self._ending.is_set():
            remote = self._servers[index]
            try:
                if remote.place is None:
                    await asyncio.wrap_future(remote.described.future())
                    self._locate(remote)
                    local.display.note(f"{remote} starts")
                    url = self._url(remote)
                    urls = list(self._assignment.server_urls)
                    urls[index] = url
                    self._assignment = self._assignment.model_copy(update={"server_urls": tuple(urls)})
                    local.tell_trainer(
                        index=index, event="starting", detail="its node was lost", num_restarts=0, url=url
                    )
                assert remote.place is not None
                node = Node(own_address=remote.place.address)
                assignment = self._assignment.model_copy(update={"node": node})
                end = await self._run(remote, assignment, trains=False, server=index, moves=self._moves.get(index, 0))
            except RayActorError:
                if self._ending.is_set():
                    return
                ray.kill(remote.actor)  # it may only be cut off
                local.display.warning(f"{remote} is gone with its node; it starts again where there is room")
                local.tell_trainer(index=index, event="exited", detail="its node was lost", num_restarts=0)
                self._moves[index] = self._moves.get(index, 0) + 1
                self._place_server(index)
                continue
            except (RayTaskError, GrpoAsyncError) as error:
                end = NodeEnd(error=str(error.cause if isinstance(error, RayTaskError) else error))
            if end.error is None or self._ending.is_set():
                return
            text = f"{remote}: {plain(end.error)}"
            if not local.have_served:
                local.fail(text)
                return
            local.tell_trainer(index=index, event="given_up", detail=end.error, num_restarts=0)
            local.mark_lost(index, text)
            return

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason  # what comes after the first is a consequence
        self.trouble.set()


# ---- on another node ----


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """How the processes of a node ended; `error` is None where that was as it should be."""

    error: str | None = None
    reports: Sequence[Report] = ()


class NodeActor:
    """The actor of a node that trains, or of a server."""

    def __init__(self, directory: str, variables: Mapping[str, str]) -> None:
        die_with_parent()  # with Ray's process on this node: a thread that runs would keep this one
        self._directory, self._variables = directory, variables
        self._messages: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def describe(self, config: ExperimentConfig, attempt: Path, *, trains: bool) -> Place:
        """Look whether this node has what the run needs, before anything is loaded.

        Raises:
            ConfigError: it has not.
        """
        enter(self._directory, self._variables)
        engine = choose_engine(config)
        if not attempt.is_file():
            raise ConfigError(
                f"run.dir: {attempt} is not on {platform.node()}; run.dir has to be on a file system that all nodes share"
            )
        try:
            check_node(config, engine=engine, trains=trains)
        except ConfigError as error:
            raise ConfigError(f"on {platform.node()}: {error}") from None
        address = ray.util.get_node_ip_address()
        (port,) = free_ports(address, 1)
        return Place(host=platform.node(), address=address, port=port, engine=engine, versions=_versions())

    def receive(self, message: Mapping[str, Any]) -> None:
        """What the lead says: restart_server or server_serving of the trainer, or "end"."""
        self._messages.put(message)

    def run(
        self,
        lead: Any,
        config: ExperimentConfig,
        engine: EngineChoice,
        assignment: Assignment,
        token: str | None,
        *,
        trains: bool,
        server: int | None = None,
        moves: int = 0,
    ) -> NodeEnd:
        """Run this node's part until it ends or the lead says so.

        Args:
            server: index of the server that runs here, which has moved to another node `moves` times.
        """
        with private_folder() as private:
            servers = range(0) if server is None else range(server, server + 1)
            plan = plan_processes(
                config,
                engine=engine,
                assignment=assignment.model_copy(update={"private_dir": private}),
                token=token,
                trains=trains,
                servers=servers,
            )
            if moves:  # the older logs stay
                moved = [replace(spec, log_name=f"server_{server}.node_{moves + 1}.log") for spec in plan.servers]
                plan = replace(plan, servers=tuple(moved))
            display = Display(Progress(max_steps=config.num_steps), [_Relay(lead)])

            def tell_trainer(**event: Any) -> None:
                lead.tell.remote({"kind": "server_event", **event})

            local = NodeProcesses(
                config, plan, display, tell_trainer=tell_trainer, first_server=server or 0, leads=False
            )
            return asyncio.run(_run_node(local, self._messages, trains=trains))


async def _run_node(local: NodeProcesses, messages: queue.SimpleQueue[Mapping[str, Any]], *, trains: bool) -> NodeEnd:
    """Start what is planned here, watch, end."""
    ended, saves = asyncio.Event(), False

    async def listen() -> None:
        nonlocal saves
        while True:
            while not messages.empty():
                message = messages.get()
                if message["kind"] == "end":
                    saves = message["saves"]
                    ended.set()
                else:
                    local.receive(message)
            await asyncio.sleep(POLL_S / 5)  # back-off until the next look; cancelled with the run

    async with local:
        listening = asyncio.create_task(listen())
        try:
            await local.start()
            await local.wait(ended, local.lost_servers, local.watcher.trouble)
            failure = local.server_failure or local.watcher.failure
            if local.is_training:
                if saves:  # its ranks end with those of the other nodes
                    await local.wait(timeout_s=GRACE_S)
                await local.end_trainer()
            elif trains and local.trainer.exited.result() != 0:
                cause = local.watcher.explain()
                failure = failure or (local.trainer.describe_end() if cause is None else cause.text)
            await local.end_servers()
        finally:
            listening.cancel()
        return NodeEnd(error=failure, reports=tuple(local.watcher.reports))


class _Relay(View):
    """Shows the notes and warnings of this node on that of rank 0."""

    def __init__(self, lead: Any) -> None:
        self._lead = lead

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in ("note", "warning"):
            self._lead.tell.remote({"kind": event, "text": f"{platform.node()}: {fields['text']}"})


def _versions() -> dict[str, str]:
    """Versions that must be equal on all nodes."""
    return {"grpo_async": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def enter(directory: str, variables: Mapping[str, str]) -> None:
    """Go to the folder in which the command was typed: paths of the configuration are relative to it.

    Raises:
        ConfigError: it is not there.
    """
    if not Path(directory).is_dir():
        raise ConfigError(
            f"{platform.node()} has no folder {directory}, in which the command was typed; code, data and run.dir have to be "
            "on a file system that all nodes share"
        )
    os.chdir(directory)
    os.environ.update(variables)


def described_resources(resources: Mapping[str, float]) -> str:
    return (
        " and ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if resources.get(name)) or "none"
    )


def place_actor(actor: type, places: Any, index: int, resources: Mapping[str, int]) -> Any:
    """An actor class for one place of the trainer."""
    return ray.remote(actor).options(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        max_concurrency=16,
        scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=index),
    )
