"""A run on a Ray cluster (`launch.ray`), for more than one machine: places, the actor that runs a process there, lost nodes.

    the command        the launcher of the run, as on one machine (launch.run); begins again when a node that trains is lost
     |- NodeActor      in each place of the trainer: torchrun with its ranks
     `- NodeActor      for each start of a server, as soon as there is room anywhere

An actor plans and starts its process with the same code as one machine does (launch.site), and passes on what that says. The
process dies with its actor, and the actor with its node or with the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_async import __version__
from grpo_async.checks.config_checks import check_inputs, check_node
from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.errors import ConfigError, DeadlineError, GrpoAsyncError, RunError
from grpo_async.launch.children import Child, log_file, private_folder
from grpo_async.launch.gpus import fill_dtypes, gpus_of_a_server
from grpo_async.launch.plan import ProcessPlan, own_urls, plan_processes, server_log, server_name
from grpo_async.launch.prepare import check_start
from grpo_async.launch.run import end_with_report, lead_run, prepared
from grpo_async.launch.signals import exit_on_signals
from grpo_async.launch.site import LocalSite
from grpo_async.launch.supervise import MakeSite, RunOutcome
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.machine import Machine, free_ports, inspect_machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import count

_FORWARDED = ("GRPO_ASYNC_TOKEN", "HF_", "WANDB_", "TRACKIO_")
"""Variables of the command's environment that its actors get."""
_POLL_S = 0.5


def run_on_ray(config: ExperimentConfig, *, resume: str | None, clean: bool, output: Output) -> int:
    """Run an experiment on the cluster that `launch.ray` names; returns the exit code. Call it from the main thread.

    Raises:
        ConfigError: the cluster is not there, or the configuration or something that it names is wrong; nothing was started.
        RunError: the cluster has no room.
    """
    check_start(config, resume=resume, clean=clean)  # before what takes seconds
    try:
        ray.init(address=config.launch.ray, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"launch.ray: {config.launch.ray}: there is no Ray cluster ({error}); start it with `ray start --head`, and `ray start "
            "--address=HEAD:6379` on the other machines"
        ) from error
    run_dir = RunDir(config.run_path.absolute())
    try:
        # Ray prints the logs of a node that died, in the middle of ours
        with contextlib.redirect_stdout(io.StringIO()), exit_on_signals():
            for left in range(config.launch.max_restarts, -1, -1):
                outcome = _attempt(config, run_dir, resume, clean, output)
                if not outcome.has_lost_a_node or not left:
                    break
                output.warn(f"{outcome.error}\nthe run begins again by itself (launch.max_restarts: {left} left)")
                resume, clean = ("latest", False) if run_dir.checkpoint_steps() else (None, True)
    finally:
        ray.shutdown()
    end_with_report(outcome, config, run_dir, output)
    return outcome.exit_code


def _attempt(config: ExperimentConfig, run_dir: RunDir, resume: str | None, clean: bool, output: Output) -> RunOutcome:
    with _placed(config, output) as cluster:
        engine = cluster.lead.engine
        config = fill_dtypes(config, engine, cluster.lead.machine.gpus)
        notes = check_inputs(config, engine=engine, is_here=False)
        with prepared(config, run_dir, resume=resume, clean=clean) as start:
            return lead_run(config, engine, output, start=start, notes=notes, lay_out=cluster.lay_out)


class _Place(NamedTuple):
    """Where an actor is, with a free port, and what is there."""

    host: str
    address: str
    port: int
    engine: EngineChoice
    machine: Machine
    versions: Mapping[str, str]


@dataclass(slots=True)
class _Remote:
    """One NodeActor: what it is for, and where it is, as soon as that is known."""

    name: str
    actor: Any
    looked: Any
    place: _Place | None = None

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name} ({plain(self.place.host)}, {self.place.address})"

    def locate(self) -> _Place:
        """Wait until it has looked around."""
        try:
            self.place = self.place or ray.get(self.looked)
        except RayTaskError as error:
            raise ConfigError(f"{self.name}: {_cause(error)}") from None
        except RayActorError:
            raise RunError(f"{self.name} was lost before it began") from None
        assert self.place is not None
        return self.place

    def check_like(self, lead: _Place) -> None:
        place = self.locate()
        if others := [
            f"{name} {ours} -> {place.versions[name]}"
            for name, ours in lead.versions.items()
            if place.versions[name] != ours
        ]:
            raise ConfigError(
                f"other versions are installed on {place.host} than on the node with rank 0: {', '.join(others)}"
            )


class _RemoteChild(Child):
    """A process on another node. It is killed with its actor. `messages`: what it says, the last of which is its exit status."""

    def __init__(self, remote: _Remote, log: Path, messages: Any, receive: Callable[[Mapping[str, Any]], None]) -> None:
        self.name, self.log = str(remote), log
        self._actor = remote.actor
        self._problem: str | None = None
        self.exited = asyncio.ensure_future(self._receive(messages, receive))

    @property
    def end(self) -> str:
        return self._problem or super().end

    def terminate(self) -> None:
        ray.kill(self._actor)  # when its node is lost, it may only be cut off

    kill = terminate

    async def _receive(self, messages: Any, receive: Callable[[Mapping[str, Any]], None]) -> int:
        try:
            async for reference in messages:
                message = await reference
                if message["kind"] == "exited":
                    return int(message["status"])
                receive(message)
        except RayActorError:
            self.is_lost = True
            self._problem = "is gone: the machine or the network failed, or its processes were killed"
        except RayTaskError as error:
            self._problem = f"could not be started: {_cause(error)}"
        return 1


@contextmanager
def _placed(config: ExperimentConfig, output: Output) -> Iterator[Cluster]:
    """Reserve the places of the trainer, with an actor in each, while the context is open."""
    launch = config.launch
    bundle = {"CPU": launch.num_trainer_ranks * launch.trainer_threads}
    if launch.device == "cuda" or (launch.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0):
        bundle["GPU"] = launch.num_trainer_ranks
    wanted = f"{count(launch.trainer_nodes, 'machine')} with {_resources(bundle)} to train"
    places = ray.util.placement_group([bundle] * launch.trainer_nodes, strategy="PACK")
    cluster: Cluster | None = None
    try:
        ready = places.ready()
        if not ray.wait([ready], timeout=_POLL_S)[0]:
            output.say(f"waiting for {wanted}; free in the cluster: {_resources(ray.available_resources())}")
        _wait_for([ready], 1, f"room for {wanted}", launch.placement_timeout_s)
        cluster = Cluster(config, places, bundle)
        yield cluster
    finally:
        if cluster is not None:
            cluster.kill()
        ray.util.remove_placement_group(places)


class Cluster:
    """The nodes of one attempt, and their processes, as its supervisor sees them (supervise.Site).

    Attributes:
        lead: where rank 0 is.
    """

    def __init__(self, config: ExperimentConfig, places: Any, bundle: Mapping[str, int]) -> None:
        self._config = config
        self._all: list[_Remote] = []
        self._servers: list[_Remote] = []
        number = 0 if config.inference.urls else config.inference.max_replicas
        self.server_names = [server_name(index, number) for index in range(number)]
        self._trainers = [
            self._start(
                f"trainer node {rank}",
                trains=True,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=rank),
            )
            for rank in range(config.launch.trainer_nodes)
        ]
        self._wait_for(self._trainers, len(self._trainers), "the machines that train")
        self.lead = self._trainers[0].locate()

    def lay_out(
        self,
        config: ExperimentConfig,
        engine: EngineChoice,
        assignment: Assignment,
        token: str | None,
        notes: Sequence[str],
    ) -> tuple[ProcessPlan, MakeSite]:
        """Find places for the servers that the run needs; returns the plan of the node with rank 0 (see run.LayOut)."""
        self._config = config
        self._servers = [self._place_server(name) for name in self.server_names]
        least = min(len(self._servers), config.inference.min_replicas)
        self._wait_for(self._servers, least, "room for the servers")
        for remote in (*self._trainers, *self._servers):
            if ray.wait([remote.looked], timeout=0.0)[0]:
                remote.check_like(self.lead)
        address = self.lead.address
        node = Node(count=config.launch.trainer_nodes, address=address, port=self.lead.port, own_address=address)
        urls = tuple(map(self._url, self._servers))
        self._plan = partial(plan_processes, config, engine=engine, token=token)
        assignment = assignment.model_copy(update={"node": node, "server_urls": urls})
        plan = self._plan(assignment=assignment, machine=self.lead.machine, servers=range(0), notes=notes)
        self._assignment = plan.assignment
        return plan, self._site

    def kill(self) -> None:
        """End every actor; their processes die with them."""
        for remote in self._all:
            ray.kill(remote.actor)

    # ---- supervise.Site ----

    def _site(self, receive: Callable[[Mapping[str, Any]], None], warn: Callable[[str], None]) -> Cluster:
        self._receive = receive
        return self

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield  # processes end with their actors

    async def spawn_server(self, index: int, num_restarts: int) -> Child:
        """Start a server as soon as there is room for it, on any node."""
        if num_restarts:
            self._servers[index] = self._place_server(self.server_names[index])
        remote = self._servers[index]
        await asyncio.wait([asyncio.wrap_future(remote.looked.future())])
        remote.check_like(self.lead)
        urls = list(self._assignment.server_urls)
        urls[index] = self._url(remote)
        self._assignment = self._assignment.model_copy(update={"server_urls": tuple(urls)})
        log = server_log(index, len(urls))
        child = self._spawn(remote, Node(), log, num_restarts, trains=False, servers=range(index, index + 1))
        child.url = urls[index]
        return child

    async def spawn_trainers(self) -> Sequence[Child]:
        """Start torchrun on each node that trains; that of rank 0 is the first."""
        logs = ["trainer.log", *(f"trainer_node{rank}.log" for rank in range(1, len(self._trainers)))]
        return [
            self._spawn(remote, self._assignment.node.model_copy(update={"rank": rank}), log, servers=range(0))
            for rank, (remote, log) in enumerate(zip(self._trainers, logs, strict=True))
        ]

    def send(self, kind: str, **content: Any) -> None:
        """Tell the trainer, now or when it connects."""
        self._trainers[0].actor.send.remote(kind, content)

    async def read_the_rest(self) -> None:
        """All that a process has said comes before its end."""

    def silent(self) -> str | None:
        """Nothing is known of it here."""
        return None

    def _spawn(self, remote: _Remote, node: Node, log: str, num_restarts: int = 0, **options: Any) -> _RemoteChild:
        node = node.model_copy(update={"own_address": remote.locate().address})
        assignment = self._assignment.model_copy(update={"node": node})
        stream = remote.actor.run.options(num_returns="streaming")
        messages = stream.remote(self._config, partial(self._plan, **options), assignment, num_restarts)
        return _RemoteChild(remote, log_file(assignment.attempt_dir, log, num_restarts), messages, self._receive)

    # ---- places ----

    def _place_server(self, name: str) -> _Remote:
        """Ask Ray for a place for a server, on any node."""
        gpus = gpus_of_a_server(self._config, self.lead.engine)
        num_cpus = 1 if gpus else self._config.inference.threads
        return self._start(name, trains=False, num_gpus=gpus, num_cpus=num_cpus, scheduling_strategy="SPREAD")

    def _start(self, name: str, *, trains: bool, **options: Any) -> _Remote:
        variables = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        actor = ray.remote(NodeActor).options(**options).remote(os.getcwd(), variables)
        self._all.append(_Remote(name, actor, actor.look.remote(self._config, trains=trains)))
        return self._all[-1]

    def _wait_for(self, remotes: Sequence[_Remote], number: int, what: str) -> None:
        _wait_for([remote.looked for remote in remotes], number, what, self._config.launch.placement_timeout_s)

    def _url(self, remote: _Remote) -> str:
        if remote.place is None:
            return ""
        return own_urls(self._config, remote.place.address, [remote.place.port])[0]


class NodeActor:
    """Runs one process on a node: torchrun, or one start of a server."""

    def __init__(self, directory: str, variables: Mapping[str, str]) -> None:
        die_with_parent()  # with Ray's process on this node
        self._directory, self._variables = directory, variables
        self._site: LocalSite | None = None
        self._begun = asyncio.Event()

    async def look(self, config: ExperimentConfig, *, trains: bool) -> _Place:
        """Go to the folder in which the command was typed, to which paths of the configuration are relative, and look whether this
        node has what the run needs, before anything is loaded."""
        host = platform.node()
        try:
            os.chdir(self._directory)
        except OSError as error:
            raise ConfigError(
                f"{host}: {error}; code, data and run.dir have to be on a file system that all nodes share"
            ) from error
        os.environ.update(self._variables)
        engine = choose_engine(config)
        try:
            check_node(config, engine=engine, trains=trains)
        except ConfigError as error:
            raise ConfigError(f"on {host}: {error}") from None
        address = ray.util.get_node_ip_address()
        versions = {"grpo_async": __version__, **{name: version(name) for name in ("torch", "transformers")}}
        return _Place(host, address, free_ports(address, 1)[0], engine, inspect_machine(), versions)

    async def run(
        self, config: ExperimentConfig, plan: Callable[..., ProcessPlan], assignment: Assignment, num_restarts: int
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Run the process until it ends; yields what it says, and at last {"kind": "exited", "status": ...}."""
        host, messages = platform.node(), asyncio.Queue[Mapping[str, Any]]()
        if not assignment.attempt_dir.is_dir():
            raise ConfigError(
                f"run.dir: {assignment.attempt_dir} is not on {host}; run.dir has to be on a file system that all nodes share"
            )

        def warn(text: str) -> None:
            messages.put_nowait({"kind": "warning", "text": f"{host}: {text}"})

        with private_folder() as private:
            planned = plan(assignment=assignment.model_copy(update={"private_dir": private}))
            site = LocalSite(config, planned, messages.put_nowait, warn)
            async with site.running():
                self._site = site
                self._begun.set()
                trainers = await site.spawn_trainers() if planned.trainer is not None else ()
                child = trainers[0] if trainers else await site.spawn_server(0, num_restarts)
                child.exited.add_done_callback(lambda _: messages.put_nowait({}))
                while message := await messages.get():  # as long as the process runs
                    yield message
                await site.read_the_rest()
                while not messages.empty():
                    yield messages.get_nowait()
                yield {"kind": "exited", "status": child.exited.result()}

    async def send(self, kind: str, content: Mapping[str, Any]) -> None:
        """Tell the trainer."""
        await self._begun.wait()
        assert self._site is not None
        self._site.send(kind, **content)


def _cause(error: RayTaskError) -> Exception:
    """The error of ours that another node raised, or all that Ray says of another one."""
    return error.cause if isinstance(error.cause, GrpoAsyncError) else error


def _resources(resources: Mapping[str, float]) -> str:
    """{"CPU": 2.0, "GPU": 1.0} -> "2 CPUs and 1 GPUs"."""
    return (
        " and ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if resources.get(name)) or "none"
    )


def _wait_for(references: Sequence[Any], number: int, what: str, timeout_s: float) -> None:
    """Wait until `number` of Ray's references are there."""
    ends_at = time.monotonic() + timeout_s
    while number and len(ray.wait(list(references), num_returns=number, timeout=_POLL_S)[0]) < number:
        if time.monotonic() > ends_at:
            free, whole = _resources(ray.available_resources()), _resources(ray.cluster_resources())
            raise DeadlineError(
                what,
                waited_s=timeout_s,
                setting="launch.placement_timeout_s",
                hint=f"Free in the cluster: {free}, of {whole} in all; see `ray status`.",
            )
