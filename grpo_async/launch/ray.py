"""A run on a Ray cluster (`launch.ray`), for more than one machine.

    the command        reserves places, shows what happens, passes signals on, begins again when a node is lost (run_on_ray)
     `- Lead           actor in the first place of the trainer: the launcher of the run, as on one machine (launch.run)
         |- NodeActor  in each further place of the trainer: torchrun with its ranks
         `- NodeActor  for each server, spread over the cluster: Ray starts it as soon as there is room, also after its node is lost

Every actor starts its processes with the same code as on one machine (launch.node); they die with it, and it with its node.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from rich.console import Console

from grpo_async.checks.config_checks import check_inputs
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.display.output import Output, OutputMode
from grpo_async.errors import ConfigError, DeadlineError, GrpoAsyncError
from grpo_async.launch.gpus import fill_dtypes
from grpo_async.launch.nodes import (
    POLL_S,
    RayNodes,
    StoppedError,
    described_resources,
    enter,
    place_actor,
)
from grpo_async.launch.run import lead_run, prepared, report_end, warn_of_report, write_report
from grpo_async.launch.supervise import RunOutcome
from grpo_async.processes.machine import inspect_machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import choose_engine
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.text import count

Event = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""A call for the command to repeat: of its "output" or "display", by the name of the method."""

_FORWARDED = ("GRPO_ASYNC_TOKEN", "HF_", "WANDB_", "TRACKIO_")
"""Variables of the command's environment that its actors get."""
_SHOWN = [name for name in vars(Display) if not name.startswith("_") and name != "unknown_message"]


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
        # Ray prints the logs of a node that died, in the middle of ours
        with contextlib.redirect_stdout(io.StringIO()), _signals() as signals:
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


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The signals that have come and were not passed on yet."""
    arrived: list[signal.Signals] = []

    def take(number: int, frame: FrameType | None) -> None:
        arrived.append(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN or number is not signal.SIGHUP:  # under nohup it is ignored on purpose
            signal.signal(number, take)
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    places = ray.util.placement_group([bundle] * launch.trainer_nodes, strategy="PACK")
    lead: Any = None
    try:
        if not _wait_for_places(places, bundle, config, output, signals):
            stopped = signals[0]
            error = f"{stopped.name} before the run had started"
            return RunOutcome(exit_code=130 if stopped is signal.SIGINT else 143, error=error), None
        variables = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
        lead = place_actor(Lead, places, 0, bundle).remote(os.getcwd(), variables)
        running = lead.run.remote(config, places, bundle, resume, clean, is_restart)
        _show(lead, output, signals)
        outcome, problem = ray.get(running)
        return outcome, problem
    except RayTaskError as error:
        if isinstance(error.cause, GrpoAsyncError):
            raise error.cause from None
        raise
    except RayActorError:
        text = "the node with trainer rank 0 is gone: the machine or the network failed, or its processes were killed"
        return RunOutcome(exit_code=1, error=text, has_lost_a_node=True), None
    finally:
        if lead is not None:
            ray.kill(lead)
        ray.util.remove_placement_group(places)


def _wait_for_places(
    places: Any, bundle: Mapping[str, int], config: ExperimentConfig, output: Output, signals: Sequence[signal.Signals]
) -> bool:
    """Wait until Ray has reserved the places of the trainer; False: a signal came.

    Raises:
        DeadlineError: it has not within `launch.placement_timeout_s`.
    """
    wanted = f"{count(config.launch.trainer_nodes, 'machine')} with {described_resources(bundle)} to train"
    timeout_s, is_told = config.launch.placement_timeout_s, False
    ends_at = time.monotonic() + timeout_s
    ready = places.ready()
    while not signals:
        if ray.wait([ready], timeout=POLL_S)[0]:
            return True
        if not is_told:
            output.say(f"waiting for {wanted}; free in the cluster: {described_resources(ray.available_resources())}")
            is_told = True
        if time.monotonic() > ends_at:
            raise DeadlineError(
                f"room for {wanted}",
                waited_s=timeout_s,
                setting="launch.placement_timeout_s",
                hint=f"The cluster has {described_resources(ray.cluster_resources())} in all, see `ray status`.",
            )
    return False


def _show(lead: Any, output: Output, signals: list[signal.Signals]) -> None:
    """Show what the lead reports, and pass signals on, until the run is over."""
    with ExitStack() as stack:
        display: Any = None
        asked = lead.events.remote()
        while True:
            while signals:
                lead.take_signal.remote(signals.pop(0))
            if not ray.wait([asked], timeout=POLL_S)[0]:
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


class _RemoteOutput(Output):
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

        def both(name: str, method: Callable[..., None], *arguments: Any, **options: Any) -> None:
            self._put(("display", name, arguments, options))
            method(*arguments, **options)

        for name in _SHOWN:
            setattr(display, name, partial(both, name, getattr(display, name)))
        return display


class Lead:
    """The actor on the node with rank 0."""

    def __init__(self, directory: str, variables: Mapping[str, str]) -> None:
        die_with_parent()
        self._directory, self._variables = directory, variables
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._nodes: RayNodes | None = None
        self._stopped: list[signal.Signals] = []

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
            enter(self._directory, self._variables)
            engine = choose_engine(config)
            config = fill_dtypes(config, engine, inspect_machine().gpus)
            notes = check_inputs(config, engine=engine)
            run_dir = RunDir(config.run_path.absolute())
            if is_restart:
                has_steps = bool(run_dir.checkpoint_steps())
                resume, clean = ("latest", False) if has_steps else (None, True)
            with prepared(config, run_dir, resume=resume, clean=clean) as start:
                nodes = self._nodes = RayNodes(places, bundle, self._directory, self._variables, self._stopped)
                try:
                    output = _RemoteOutput(self._events.put)
                    outcome = lead_run(config, engine, output, start=start, nodes=nodes, notes=notes)
                except StoppedError as error:
                    outcome = RunOutcome(exit_code=error.exit_code, error=str(error))
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
        if self._nodes is not None:
            self._nodes.take({"kind": "signal", "number": number})

    def tell(self, message: Mapping[str, Any]) -> None:
        """Another node reports something."""
        if self._nodes is not None:
            self._nodes.take(message)
