"""A run on a Ray cluster (`launch.ray`), for more than one machine: places, the actor that runs a process there, lost nodes.

    the command        the launcher of the run, as on one machine (launch.start); begins again when a node that trains is lost
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
from grpo_async.launch.gpus import fill_in_for_devices, gpus_of_a_server
from grpo_async.launch.plan import ProcessPlan, own_urls, plan_processes, server_log, server_name, trainer_log
from grpo_async.launch.prepare import check_start
from grpo_async.launch.signals import exit_on_signals
from grpo_async.launch.site import LocalSite
from grpo_async.launch.start import end_with_report, lead_run, prepared
from grpo_async.launch.supervise import RunOutcome
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.machine import Machine, free_ports, inspect_machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import count

_FORWARDED = ("GRPO_ASYNC_TOKEN", "HF_", "WANDB_")
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
        config = cluster.config = fill_in_for_devices(config, engine, cluster.lead.machine.gpus)
        notes = check_inputs(config, engine=engine, is_here=False)
        with prepared(config, run_dir, resume=resume, clean=clean) as start:
            return lead_run(config, engine, output, start=start, notes=notes, site=cluster)


class _Place(NamedTuple):
    """Where an actor is, with a free port, and what is there."""

    host: str
    address: str
    port: int
    engine: EngineChoice
    machine: Machine
    versions: Mapping[str, str]

    def check_like(self, lead: _Place) -> None:
        """Raise ConfigError where this node has other versions than that of rank 0."""
        if self.versions != lead.versions:
            here, there = (", ".join(map(" ".join, place.versions.items())) for place in (self, lead))
            raise ConfigError(
                f"{self.host} has {here}, and the node with rank 0 {there}: install the same versions on both"
            )


class _RemoteChild(Child):
    """The process of one NodeActor, which ends with its actor. It has `looked` at its node before it is begun."""

    def __init__(self, name: str, actor: Any, looked: Any) -> None:
        self.name = name
        self.actor = actor
        self.looked = looked
        self._problem: str | None = None

    def locate(self) -> _Place:
        """Wait until it has looked around. Raises ConfigError: its node lacks something that the run needs."""
        try:
            place: _Place = ray.get(self.looked)
        except RayTaskError as error:
            raise ConfigError(f"{self.name}: {_cause(error)}") from None
        except RayActorError:
            raise RunError(f"{self.name} was lost before it began") from None
        return place

    def begin(self, place: _Place, log: Path, messages: Any, receive: Callable[[Mapping[str, Any]], None]) -> None:
        """`messages`: what the process says, the last of which is its exit status."""
        self.name, self.log = f"{self.name} ({plain(place.host)}, {place.address})", log
        self.exited = asyncio.ensure_future(self._receive(messages, receive))

    @property
    def end(self) -> str:
        return self._problem or super().end

    def terminate(self) -> None:
        ray.kill(self.actor)  # when its node is lost, it may only be cut off

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
        config: with the dtypes of the devices there.
    """

    def __init__(self, config: ExperimentConfig, places: Any, bundle: Mapping[str, int]) -> None:
        self.config = config
        self._actors: list[Any] = []
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
        looked, timeout_s = [trainer.looked for trainer in self._trainers], config.launch.placement_timeout_s
        _wait_for(looked, len(looked), "the machines that train", timeout_s)
        self.lead = self._trainers[0].locate()

    def lay_out(
        self, engine: EngineChoice, assignment: Assignment, token: str | None, notes: Sequence[str]
    ) -> ProcessPlan:
        """Plan the node with rank 0. Where servers are is known when each has found its place."""
        self._plan = partial(plan_processes, self.config, engine=engine, token=token)
        address, urls = self.lead.address, ("",) * len(self.server_names)
        node = Node(count=len(self._trainers), address=address, port=self.lead.port, own_address=address)
        assignment = assignment.model_copy(update={"node": node, "server_urls": urls})
        plan = self._plan(assignment=assignment, machine=self.lead.machine, servers=range(0), notes=notes)
        self._assignment = plan.assignment
        return plan

    def kill(self) -> None:
        """End every actor; their processes die with them."""
        for actor in self._actors:
            ray.kill(actor)

    # ---- supervise.Site ----

    @asynccontextmanager
    async def running(
        self, receive: Callable[[Mapping[str, Any]], None], warn: Callable[[str], None]
    ) -> AsyncIterator[None]:
        self._receive = receive
        yield

    async def spawn_server(self, index: int, num_restarts: int) -> Child:
        """Start a server as soon as there is room for it, on any node.

        Raises:
            DeadlineError: there is no room for one that the run needs from its beginning.
        """
        inference, launch = self.config.inference, self.config.launch
        gpus = gpus_of_a_server(self.config, self.lead.engine)
        child = self._start(
            self.server_names[index],
            trains=False,
            num_gpus=gpus,
            num_cpus=1 if gpus else inference.threads,
            scheduling_strategy="SPREAD",
        )
        timeout_s = launch.placement_timeout_s if index < inference.min_replicas and not num_restarts else None
        found = asyncio.wrap_future(child.looked.future())
        if not (await asyncio.wait([found], timeout=timeout_s))[0]:
            raise _no_room("room for the servers", launch.placement_timeout_s)
        place = child.locate()
        urls = list(self._assignment.server_urls)
        (urls[index],) = own_urls(self.config, place.address, [place.port])
        child.url = urls[index]
        log, number = server_log(index, len(urls)), range(index, index + 1)
        assignment = self._assignment.model_copy(update={"node": Node(), "server_urls": tuple(urls)})
        return self._begin(child, place, assignment, log, num_restarts, trains=False, servers=number)

    async def spawn_trainers(self) -> Sequence[Child]:
        """Start torchrun on each node that trains; that of rank 0 is the first."""
        for rank, child in enumerate(self._trainers):
            node = self._assignment.node.model_copy(update={"rank": rank})
            assignment = self._assignment.model_copy(update={"node": node})
            self._begin(child, child.locate(), assignment, trainer_log(rank), servers=range(0))
        return self._trainers

    def send(self, kind: str, **content: Any) -> None:
        self._trainers[0].actor.send.remote(kind, content)

    async def read_the_rest(self) -> None:
        """All that a process has said comes before its end."""

    # ---- actors ----

    def _start(self, name: str, *, trains: bool, **options: Any) -> _RemoteChild:
        variables = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        actor = ray.remote(NodeActor).options(**options).remote(os.getcwd(), variables)
        self._actors.append(actor)
        return _RemoteChild(name, actor, actor.look.remote(self.config, trains=trains))

    def _begin(
        self, child: _RemoteChild, place: _Place, assignment: Assignment, log: str, num_restarts: int = 0, **part: Any
    ) -> Child:
        """Let an actor start its process. `part`: what plan_processes is told of it."""
        place.check_like(self.lead)
        node = assignment.node.model_copy(update={"own_address": place.address})
        assignment = assignment.model_copy(update={"node": node})
        stream = child.actor.run.options(num_returns="streaming")
        messages = stream.remote(self.config, partial(self._plan, **part), assignment, num_restarts)
        child.begin(place, log_file(assignment.attempt_dir, log, num_restarts), messages, self._receive)
        return child


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
            site = LocalSite(config, planned)
            async with site.running(messages.put_nowait, warn):
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
        await self._begun.wait()
        assert self._site is not None
        self._site.send(kind, **content)


def _cause(error: RayTaskError) -> Exception:
    """The error of ours that another node raised, or all that Ray says of another one."""
    return error.cause if isinstance(error.cause, GrpoAsyncError) else error


def _resources(resources: Mapping[str, float]) -> str:
    """{"CPU": 2.0, "GPU": 1.0} -> "2 CPUs and 1 GPUs"."""
    return " and ".join(f"{resources[name]:g} {name}s" for name in ("CPU", "GPU") if resources.get(name)) or "none"


def _wait_for(references: Sequence[Any], number: int, what: str, timeout_s: float) -> None:
    ends_at = time.monotonic() + timeout_s
    while len(ray.wait(list(references), num_returns=number, timeout=_POLL_S)[0]) < number:
        if time.monotonic() > ends_at:
            raise _no_room(what, timeout_s)


def _no_room(what: str, timeout_s: float) -> DeadlineError:
    free, whole = _resources(ray.available_resources()), _resources(ray.cluster_resources())
    hint = f"Free in the cluster: {free}, of {whole} in all; see `ray status`."
    return DeadlineError(what, waited_s=timeout_s, setting="launch.placement_timeout_s", hint=hint)
