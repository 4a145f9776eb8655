"""A run on a Ray cluster (`launch.ray`), for more than one machine.

    the command        reserves places, shows what happens, passes signals on, begins again when a node is lost (run_on_ray)
     `- LeadActor      in the first place of the trainer: the launcher of the run, as on one machine (launch.run)
         |- NodeActor  in each further place of the trainer: torchrun with its ranks
         `- NodeActor  for each start of a server, as soon as there is room anywhere

Every actor plans and starts its processes with the same code as on one machine; they die with it, and it with its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import platform
import queue
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from grpo_async import __version__
from grpo_async.checks.config_checks import check_inputs, check_node
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.display.output import Output, OutputMode
from grpo_async.errors import ConfigError, DeadlineError, GrpoAsyncError, RunError
from grpo_async.launch.children import Child, Children, first_of, log_file
from grpo_async.launch.gpus import fill_dtypes, gpus_of_a_server
from grpo_async.launch.plan import ProcessPlan, own_urls, plan_processes, server_log, server_name
from grpo_async.launch.reaper import private_folder
from grpo_async.launch.run import lead_run, prepared, report_end, warn_of_report, write_report
from grpo_async.launch.signals import ENDING, Signals, exit_code_of, handling
from grpo_async.launch.supervise import RunOutcome
from grpo_async.launch.watcher import Watcher
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.heartbeat import RankEnd
from grpo_async.processes.machine import free_ports, inspect_machine
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.concurrency import all_of, in_background
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import count

logger = logging.getLogger(__name__)

Event = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""A call for the command to repeat: of its "output" or "display", by the name of the method."""

_FORWARDED = ("GRPO_ASYNC_TOKEN", "HF_", "WANDB_", "TRACKIO_")
"""Variables of the command's environment that its actors get."""
_POLL_S = 0.5


class _StoppedError(RunError):
    """A signal came before anything was started."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} before the run had started")
        self.outcome = RunOutcome(exit_code=exit_code_of(number), error=str(self))


# ---- the command ----


def run_on_ray(config: ExperimentConfig, *, resume: str | None, clean: bool, output: Output) -> int:
    """Run an experiment on the cluster that `launch.ray` names; returns the exit code. Call it from the main thread.

    Raises:
        ConfigError: the cluster is not there, or the configuration or something that it names is wrong; nothing was started.
        RunError: the cluster has no room.
    """
    try:
        ray.init(address=config.launch.ray, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"launch.ray: {config.launch.ray}: there is no Ray cluster ({error}); start it with `ray start --head`, and `ray start "
            "--address=HEAD:6379` on the other machines"
        ) from error
    try:
        signals: list[signal.Signals] = []  # that were not passed on yet
        # Ray prints the logs of a node that died, in the middle of ours
        with contextlib.redirect_stdout(io.StringIO()), handling(signals.append, *ENDING):
            is_restart = False
            for left in range(config.launch.max_restarts, -1, -1):
                outcome, problem = _attempt(config, resume, clean, output, signals, is_restart=is_restart)
                if not outcome.has_lost_a_node or not left or signals:
                    break
                output.warn(f"{outcome.error}\nthe run begins again by itself (launch.max_restarts: {left} left)")
                is_restart = True
        run_dir = RunDir(config.run_path.absolute())
        report_end(outcome, run_dir, output, report=run_dir.report if config.record.report else None)
        warn_of_report(problem, run_dir, output)
        return outcome.exit_code
    finally:
        ray.shutdown()


def _attempt(
    config: ExperimentConfig,
    resume: str | None,
    clean: bool,
    output: Output,
    signals: list[signal.Signals],
    *,
    is_restart: bool,
) -> tuple[RunOutcome, str | None]:
    """One attempt: how it ended, and why there is no report (None: there is one, or none is wanted)."""
    launch = config.launch
    has_gpus = launch.device == "cuda" or (launch.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    bundle = {"CPU": launch.num_trainer_ranks * launch.trainer_threads}
    if has_gpus:
        bundle["GPU"] = launch.num_trainer_ranks
    wanted = f"{count(launch.trainer_nodes, 'machine')} with {_resources(bundle)} to train"
    places = ray.util.placement_group([bundle] * launch.trainer_nodes, strategy="PACK")
    lead: Any = None
    try:
        ready = places.ready()
        if not ray.wait([ready], timeout=_POLL_S)[0]:
            output.say(f"waiting for {wanted}; free in the cluster: {_resources(ray.available_resources())}")
        _wait_for([ready], 1, f"room for {wanted}", launch.placement_timeout_s, signals)
        variables = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        lead = _at(LeadActor, places, 0, bundle).remote(os.getcwd(), variables)
        running = lead.run.remote(config, places, bundle, resume, clean, is_restart)
        _show(lead, output, signals)
        outcome, problem = ray.get(running)
        return outcome, problem
    except _StoppedError as error:
        return error.outcome, None
    except RayTaskError as error:
        raise _cause(error) from None
    except RayActorError:
        text = "the node with trainer rank 0 is gone: the machine or the network failed, or its processes were killed"
        return RunOutcome(exit_code=1, error=text, has_lost_a_node=True), None
    finally:
        if lead is not None:
            ray.kill(lead)
        ray.util.remove_placement_group(places)


def _show(lead: Any, output: Output, signals: list[signal.Signals]) -> None:
    """Show what the lead reports, and pass signals on, until the run is over."""
    with ExitStack() as stack:
        display: Any = None
        asked = lead.events.remote()
        while True:
            while signals:
                lead.take_signal.remote(signals.pop(0))
            if not ray.wait([asked], timeout=_POLL_S)[0]:
                continue
            for event in ray.get(asked):
                if event is None:
                    return
                target, name, arguments, options = event
                if target == "open":
                    display = stack.enter_context(output.display(**options))
                else:
                    getattr(output if target == "output" else display, name)(*arguments, **options)
            asked = lead.events.remote()


# ---- the node with rank 0 ----


class RemoteOutput(Output):
    """Prints where the command was typed."""

    def __init__(self, put: Callable[[Event], None]) -> None:
        super().__init__(OutputMode.QUIET, Console(file=io.StringIO(), quiet=True))
        self._put = put

    def say(self, text: str) -> None:
        self._put(("output", "say", (text,), {}))

    def warn(self, text: str) -> None:
        self._put(("output", "warn", (text,), {}))

    def start(self, **fields: Any) -> None:
        self._put(("output", "start", (), fields))

    def display(self, **options: Any) -> Display:
        """Show it here (status.json) and there."""
        display = super().display(**options)
        self._put(("open", "", (), options))

        shows = display.show

        def show_both(event: str, **fields: Any) -> None:
            self._put(("display", "show", (event,), fields))
            shows(event, **fields)

        display.show = show_both  # type: ignore[method-assign]
        return display


class _Place(NamedTuple):
    """Where an actor is, with a free port."""

    host: str
    address: str
    port: int


@dataclass(slots=True)
class _Remote:
    """One NodeActor: what it is for, and where it is, as soon as that is known."""

    name: str
    actor: Any
    described: Any
    place: _Place | None = None

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name} ({plain(self.place.host)}, {self.place.address})"

    def locate(self) -> _Place:
        """Read where it is, which has been `described`."""
        try:
            self.place = self.place or ray.get(self.described)
        except RayTaskError as error:
            raise ConfigError(f"{self.name}: {_cause(error)}") from None
        except RayActorError:
            raise RunError(f"{self.name} was lost before it began") from None
        assert self.place is not None
        return self.place


class _RemoteServer(Child):
    """A server on another node. It ends with its actor, and is killed with it."""

    def __init__(self, remote: _Remote, log: Path, status: Any, url: str) -> None:
        self.name, self.log, self.url = str(remote), log, url
        self._actor = remote.actor
        self._problem: str | None = None
        self.exited = asyncio.ensure_future(self._wait(status))

    def __str__(self) -> str:
        return self.name

    @property
    def end(self) -> str:
        return self._problem or super().end

    def terminate(self) -> None:
        ray.kill(self._actor)

    kill = terminate

    async def kill_all(self) -> None:
        ray.kill(self._actor)  # when its node is lost, it may only be cut off

    async def _wait(self, status: Any) -> int:
        try:
            return int(await asyncio.wrap_future(status.future()))
        except RayActorError:
            self.is_lost, self._problem = True, "is gone with its node"
        except RayTaskError as error:
            self._problem = f"could not be started: {_cause(error)}"
        return 1


class LeadActor:
    """The launcher of the run. It has no coroutines: Ray would run everything in one loop."""

    def __init__(self, directory: str, variables: Mapping[str, str]) -> None:
        die_with_parent()
        self._where = directory, variables
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stopped: list[signal.Signals] = []
        self._nodes: RayNodes | None = None

    def run(
        self,
        config: ExperimentConfig,
        places: Any,
        bundle: Mapping[str, int],
        resume: str | None,
        clean: bool,
        is_restart: bool,
    ) -> tuple[RunOutcome, str | None]:
        """See `_attempt`."""
        try:
            _enter(*self._where)
            engine = choose_engine(config)
            config = fill_dtypes(config, engine, inspect_machine().gpus)
            notes = check_inputs(config, engine=engine)
            run_dir = RunDir(config.run_path.absolute())
            if is_restart:
                has_steps = bool(run_dir.checkpoint_steps())
                resume, clean = ("latest", False) if has_steps else (None, True)
            with prepared(config, run_dir, resume=resume, clean=clean) as start:
                nodes = self._nodes = RayNodes(config, engine, places, bundle, self._where, self._stopped)
                try:
                    output = RemoteOutput(self._events.put)
                    outcome = lead_run(config, engine, output, start=start, nodes=nodes, notes=notes)
                except _StoppedError as error:
                    outcome = error.outcome
                finally:
                    nodes.kill()
                return outcome, write_report(run_dir, outcome.exit_code) if config.record.report else None
        finally:
            self._events.put(None)

    def events(self) -> list[Event | None]:
        """Wait for the next events; None is the last."""
        found = [self._events.get()]
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def take_signal(self, number: signal.Signals) -> None:
        """The command has got a signal."""
        self._stopped.append(number)
        if self._nodes is not None and self._nodes.signals is not None:
            self._nodes.signals.take(number)

    def warn(self, text: str) -> None:
        """Another node warns of something."""
        if self._nodes is not None and self._nodes.display is not None:
            self._nodes.display.warning(text)


class RayNodes:
    """The other nodes of a run, as its supervisor sees them.

    Attributes:
        assignment: of the run, as planned where rank 0 is, with the addresses that servers have now.
        trouble: set as soon as the run cannot continue because of another node; `failure` says why.
        has_lost_a_node: `failure` is that a node that trains is gone, which explains every failure of a rank.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        engine: EngineChoice,
        places: Any,
        bundle: Mapping[str, int],
        where: tuple[str, Mapping[str, str]],
        stopped: Sequence[signal.Signals],
    ) -> None:
        self._config, self._engine = config, engine
        self._places, self._bundle = places, bundle
        self._where, self._stopped = where, stopped  # where: the arguments of every actor
        self._trainers: dict[int, _Remote] = {}
        self._servers: list[_Remote] = []
        number = 0 if config.inference.urls else config.inference.max_replicas
        self.server_names = [server_name(index, number) for index in range(number)]
        self.signals: Signals | None = None
        self.display: Display | None = None
        self.trouble = asyncio.Event()
        self.failure: str | None = None
        self.has_lost_a_node = False

    # ---- before the run ----

    def gather(self, assignment: Assignment, token: str | None) -> Assignment:
        """Wait for the other nodes that train and for the servers that the run needs; returns the assignment with all addresses."""
        launch = self._config.launch
        self._plan = partial(plan_processes, self._config, engine=self._engine, token=token)
        self.assignment = assignment
        for rank in range(1, launch.trainer_nodes):
            actor = _at(NodeActor, self._places, rank, self._bundle).remote(*self._where)
            self._trainers[rank] = self._describe(f"trainer node {rank}", actor, trains=True)
        self._servers = [self._place_server(name) for name in self.server_names]
        others = list(self._trainers.values())
        self._wait_for(others, len(others), "the other machines that train")
        self._wait_for(
            self._servers, min(len(self._servers), self._config.inference.min_replicas), "room for the servers"
        )
        for remote in (*others, *self._servers):
            if ray.wait([remote.described], timeout=0.0)[0]:
                remote.locate()
        address = ray.util.get_node_ip_address()
        node = Node(count=launch.trainer_nodes, address=address, port=free_ports(address, 1)[0], own_address=address)
        urls = tuple(map(self._url, self._servers))
        self.assignment = assignment.model_copy(update={"node": node, "server_urls": urls})
        return self.assignment

    def _place_server(self, name: str) -> _Remote:
        """Ask Ray for a place for a server, on any node."""
        gpus = gpus_of_a_server(self._config, self._engine)
        options = {"num_gpus": gpus, "num_cpus": 1 if gpus else self._config.inference.threads}
        actor = ray.remote(NodeActor).options(**options, scheduling_strategy="SPREAD")
        return self._describe(name, actor.remote(*self._where), trains=False)

    def _describe(self, name: str, actor: Any, *, trains: bool) -> _Remote:
        attempt = attempt_config(self.assignment.attempt_dir)
        return _Remote(
            name, actor, actor.describe.remote(self._config, self._engine, _versions(), attempt, trains=trains)
        )

    def _wait_for(self, remotes: Sequence[_Remote], number: int, what: str) -> None:
        described = [remote.described for remote in remotes]
        _wait_for(described, number, what, self._config.launch.placement_timeout_s, self._stopped)

    def _url(self, remote: _Remote) -> str:
        if remote.place is None:
            return ""
        return own_urls(self._config, remote.place.address, ports=[remote.place.port])[0]

    # ---- during the run ----

    async def spawn_server(self, index: int, num_restarts: int) -> Child:
        """Start a server as soon as there is room for it, on any node."""
        if num_restarts:
            self._servers[index] = self._place_server(self.server_names[index])
        remote = self._servers[index]
        await asyncio.wait([asyncio.wrap_future(remote.described.future())])
        place = remote.locate()
        urls = list(self.assignment.server_urls)
        urls[index] = self._url(remote)
        self.assignment = self.assignment.model_copy(update={"server_urls": tuple(urls)})
        assignment = self.assignment.model_copy(update={"node": Node(own_address=place.address)})
        status = remote.actor.serve.remote(self._plan, assignment, index, num_restarts)
        log = log_file(assignment.attempt_dir, server_log(index, len(urls)), num_restarts)
        return _RemoteServer(remote, log, status, urls[index])

    @asynccontextmanager
    async def training(self, signals: Signals, watcher: Watcher, display: Display) -> AsyncIterator[None]:
        """Let the other nodes train while the context is open. `watcher` gets what their ranks say of their ends."""
        self.signals, self.display = signals, display
        for number in self._stopped:
            signals.take(number)
        works = [self._train(rank, remote, watcher) for rank, remote in self._trainers.items()]
        async with in_background(all_of(works), name="other nodes") as self._training:
            yield

    async def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until the trainer of every node has ended, or the node is gone, `timeout_s` at most."""
        await asyncio.wait([self._training], timeout=timeout_s)

    def name_of(self, rank: int) -> str:
        """Name of a node that trains, for messages."""
        return str(self._trainers[rank])

    def kill(self) -> None:
        """End every actor; their processes die with them."""
        for remote in (*self._trainers.values(), *self._servers):
            ray.kill(remote.actor)

    async def _train(self, rank: int, remote: _Remote, watcher: Watcher) -> None:
        node = self.assignment.node.model_copy(update={"rank": rank, "own_address": remote.locate().address})
        assignment = self.assignment.model_copy(update={"node": node})
        lead = ray.get_runtime_context().current_actor
        ends: Sequence[RankEnd] = ()
        try:
            ended = remote.actor.train.remote(self._plan, assignment, self._config, lead)
            failure, ends = await asyncio.wrap_future(ended.future())
        except RayActorError:
            self.has_lost_a_node = True
            failure = f"{remote} is gone: the machine or the network failed, or its processes were killed"
        except RayTaskError as error:
            failure = f"{remote}: {_cause(error)}"
        watcher.ends += ends
        if failure is not None:
            self.failure = self.failure or plain(failure)  # what comes after the first is a consequence
            self.trouble.set()


# ---- on another node ----


class NodeActor:
    """The actor of a node that trains, or of one start of a server."""

    def __init__(self, directory: str, variables: Mapping[str, str]) -> None:
        die_with_parent()  # with Ray's process on this node: a thread that runs would keep this one
        self._where = directory, variables

    def describe(
        self,
        config: ExperimentConfig,
        engine: EngineChoice,
        versions: Mapping[str, str],
        attempt: Path,
        *,
        trains: bool,
    ) -> _Place:
        """Look whether this node has what the run needs, before anything is loaded. `engine`, `versions`: those of the lead."""
        _enter(*self._where)
        own, host = choose_engine(config), platform.node()
        if not attempt.is_file():
            raise ConfigError(
                f"run.dir: {attempt} is not on {host}; run.dir has to be on a file system that all nodes share"
            )
        if others := [
            f"{name} {versions[name]} -> {here}" for name, here in _versions().items() if here != versions[name]
        ]:
            raise ConfigError(
                f"other versions are installed on {host} than on the node with rank 0: {', '.join(others)}"
            )
        if own.engine != engine.engine:
            raise ConfigError(
                f"{host} would serve with {own.engine}, and the node with rank 0 with {engine.engine}; set inference.engine"
            )
        try:
            check_node(config, engine=own, trains=trains)
        except ConfigError as error:
            raise ConfigError(f"on {host}: {error}") from None
        address = ray.util.get_node_ip_address()
        return _Place(host, address, *free_ports(address, 1))

    def serve(self, plan: Callable[..., ProcessPlan], assignment: Assignment, index: int, num_restarts: int) -> int:
        """Run a server until it ends; returns its exit status."""

        async def run(planned: ProcessPlan) -> int:
            async with Children(planned.assignment.attempt_dir, logger.warning) as children:
                server = await children.spawn(planned.servers[0], num_restarts=num_restarts)
                return await server.exited

        with private_folder() as private:
            assignment = assignment.model_copy(update={"private_dir": private})
            return asyncio.run(run(plan(assignment=assignment, trains=False, servers=range(index, index + 1))))

    def train(
        self, plan: Callable[..., ProcessPlan], assignment: Assignment, config: ExperimentConfig, lead: Any
    ) -> tuple[str | None, Sequence[RankEnd]]:
        """Run the ranks of this node until they end; returns what went wrong, and what they say of it."""

        def warn(text: str) -> None:
            lead.warn.remote(f"{platform.node()}: {text}")

        async def run(planned: ProcessPlan) -> tuple[str | None, Sequence[RankEnd]]:
            folder = planned.assignment.attempt_dir
            assert planned.trainer is not None
            async with Children(folder, warn) as children, Watcher(planned.assignment, config, warn) as watcher:
                trainer = await children.spawn(planned.trainer)
                await first_of([trainer], [watcher.trouble])
                failure, cause = watcher.failure, watcher.explain()
                if failure is None and trainer.exited.result() != 0:
                    failure = trainer.describe_end() if cause is None else cause.text
                return failure, watcher.ends

        with private_folder() as private:
            assignment = assignment.model_copy(update={"private_dir": private})
            return asyncio.run(run(plan(assignment=assignment, servers=range(0))))


# ---- on any node ----


def _enter(directory: str, variables: Mapping[str, str]) -> None:
    """Go to the folder in which the command was typed: paths of the configuration are relative to it."""
    if not Path(directory).is_dir():
        raise ConfigError(
            f"{platform.node()} has no folder {directory}, in which the command was typed; code, data and run.dir have to be "
            "on a file system that all nodes share"
        )
    os.chdir(directory)
    os.environ.update(variables)


def _versions() -> dict[str, str]:
    """Versions that must be equal on all nodes."""
    return {"grpo_async": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def _cause(error: RayTaskError) -> Exception:
    """The error of ours that another node raised, or all that Ray says of another one."""
    return error.cause if isinstance(error.cause, GrpoAsyncError) else error


def _at(actor: type, places: Any, index: int, resources: Mapping[str, int]) -> Any:
    """An actor class for one place of the trainer."""
    return ray.remote(actor).options(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        max_concurrency=16,
        scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=index),
    )


def _resources(resources: Mapping[str, float]) -> str:
    """{"CPU": 2.0, "GPU": 1.0} -> "2 CPUs and 1 GPUs"."""
    return (
        " and ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if resources.get(name)) or "none"
    )


def _wait_for(
    references: Sequence[Any], number: int, what: str, timeout_s: float, stopped: Sequence[signal.Signals]
) -> None:
    """Wait until `number` of Ray's references are there."""
    ends_at = time.monotonic() + timeout_s
    while number and len(ray.wait(list(references), num_returns=number, timeout=_POLL_S)[0]) < number:
        if stopped:
            raise _StoppedError(stopped[0])
        if time.monotonic() > ends_at:
            free, whole = _resources(ray.available_resources()), _resources(ray.cluster_resources())
            raise DeadlineError(
                what,
                waited_s=timeout_s,
                setting="launch.placement_timeout_s",
                hint=f"Free in the cluster: {free}, of {whole} in all; see `ray status`.",
            )
