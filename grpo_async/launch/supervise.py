"""Runs a plan to its end: starts the children, shows what they report, and leaves no process behind however it ends.

    waits for   the first of: trainer exit, loss of the servers (launch.servers restarts them), a process without a sign of life
                (processes.heartbeat), a run without progress (trainer.progress), a run directory that is gone, a signal
    outcome     trainer exits 0 with a summary -> 0; anything ends too early -> 1, with who, how and the end of its log;
                SIGINT -> 130, SIGTERM, SIGHUP, SIGQUIT -> 143, after a checkpoint when the trainer manages in time

The first failure wins: later ones are taken as its consequences and are not reported. Afterward everything that was started,
and everything that those started, is ended: SIGTERM with a grace period, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.findings.messages import read_equal_rewards
from grpo_async.launch.children import Child, first_of
from grpo_async.launch.children import end as end_children
from grpo_async.launch.plan import ProcessPlan
from grpo_async.launch.servers import Servers
from grpo_async.launch.signals import Signals
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.heartbeat import RankEnd
from grpo_async.run_directory import attempt_config
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.concurrency import in_background, in_thread
from grpo_async.utils.safe_text import plain

_OTHERS_TIMEOUT_S = 60.0
"""How long to wait for other machines to report how their ranks ended; Ray needs about 30 s to notice a lost node."""
_LOOK_S = 1.0  # between two looks at the run directory
_NOTICE_S = 5.0  # torchrun notices a death within this; it kills ranks that outlive its SIGTERM only after 30 s


class Site(Protocol):
    """Where the processes of a run are: this machine (launch.site), or a cluster (launch.ray)."""

    def lay_out(
        self, engine: EngineChoice, assignment: Assignment, token: str | None, notes: Sequence[str]
    ) -> ProcessPlan:
        """Return the plan of the machine with rank 0. `assignment` has no addresses yet; `notes` are added to the plan."""
        ...

    @property
    def server_names(self) -> Sequence[str]: ...

    def running(
        self, receive: Callable[[Mapping[str, Any]], None], warn: Callable[[str], None]
    ) -> AbstractAsyncContextManager[None]:
        """Run while the context is open. `receive` gets every message of the trainer (processes.control) but for signs of life, and
        {"kind": "silent", "text": ..., "is_back": ...} when there are none; `warn` gets sentences for the user."""
        ...

    async def spawn_server(self, index: int, num_restarts: int) -> Child: ...
    async def spawn_trainers(self) -> Sequence[Child]: ...
    def send(self, kind: str, **content: Any) -> None: ...
    async def read_the_rest(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. `error` is for the user, several lines; `summary` is the content of summary.json; `has_lost_a_node`: of a
    cluster, which is why it failed."""

    exit_code: int
    error: str | None = None
    summary: Mapping[str, Any] | None = None
    has_lost_a_node: bool = False


def lost_run_dir(assignment: Assignment) -> str | None:
    """Look whether the run directory is still there; return what happened and what to do, or None."""
    try:
        # the directory itself may survive `rm -rf`: status.json is written meanwhile
        os.stat(attempt_config(assignment.attempt_dir))
    except (FileNotFoundError, NotADirectoryError):
        return (
            f"the run directory {assignment.run_dir.root} was deleted or renamed during the run; rename it back and continue with "
            "--resume, or begin again"
        )
    except OSError:  # a file system that cannot be reached for a while
        pass
    return None


def supervise(config: ExperimentConfig, assignment: Assignment, display: Display, site: Site) -> RunOutcome:
    """Start the processes of a run, and end them; `display` shows what they report. Call it from the main thread, for signals."""
    with display:
        return asyncio.run(Supervisor(config, assignment, display, site).run())


class Supervisor:
    _trainers: Sequence[Child]
    _training: asyncio.Task[Child | None]

    def __init__(self, config: ExperimentConfig, assignment: Assignment, display: Display, site: Site) -> None:
        self._config = config
        self._assignment = assignment
        self._display = display
        self._signals = Signals()
        self._site = site
        tell_trainer = partial(site.send, "server_event")
        self._servers = Servers(config.inference, site.server_names, site.spawn_server, display, tell_trainer)
        self._has_begun = False
        self._ends: list[RankEnd] = []
        self._summary: Mapping[str, Any] | None = None
        self._trouble = asyncio.Event()
        self._failure: str | None = None
        self._can_save = False

    async def run(self) -> RunOutcome:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._signals.installed())
            site = self._site.running(self._on_message, self._display.warning)
            watching = in_background(self._watch_run_dir(), name="run directory")
            for context in (site, watching, self._servers.running()):
                await stack.enter_async_context(context)
            self._trainers = await self._site.spawn_trainers()
            self._training = asyncio.create_task(_first_failure(self._trainers))
            return await self._supervise()

    async def _watch_run_dir(self) -> None:
        # in a thread: a file system that hangs must not hold up the launcher
        lost: str | None = None
        while lost is None:
            await asyncio.sleep(_LOOK_S)  # back-off until the next look; cancelled with the run
            lost = await asyncio.wrap_future(in_thread(partial(lost_run_dir, self._assignment), name="watch-run-dir"))
        self._fail(lost)

    async def _wait(self, *events: asyncio.Event, timeout_s: float | None = None) -> None:
        """Wait until the trainer ends, one of `events` is set or a signal arrives. Without `timeout_s` as long as the run takes:
        the trainer has deadlines for everything that it waits for."""
        await first_of([self._training], [self._signals.arrived, *events], timeout_s)

    async def _supervise(self) -> RunOutcome:
        servers = self._servers
        await self._wait(servers.lost, self._trouble)
        if self._signals.arrived.is_set() and not self._training.done():
            return await self._stop()
        if self._failure is not None and not self._training.done():
            await self._end_trainer("the trainer does not go on", saves=self._can_save)
            return self._failed(self._failure)
        has_ended_well = self._training.done() and self._training.result() is None
        if servers.failure is not None and not has_ended_well:
            # if both have ended, the servers are the cause
            await self._end_trainer("no server is left", saves=servers.has_served)
            return self._failed(servers.failure)
        return await self._finish(exit_code=0)

    async def _end_trainer(self, why: str, *, saves: bool = False) -> None:
        """`saves`: ask it first to save the steps that it has made."""
        self._display.phase(f"{why}: stopping the trainer")
        if saves:
            self._site.send("stop")
            await self._wait(timeout_s=self._config.launch.stop_timeout_s)
        await end_children(self._trainers, self._signals)

    async def _stop(self) -> RunOutcome:
        signals, timeout_s = self._signals, self._config.launch.stop_timeout_s
        assert signals.first is not None
        signals.arrived.clear()
        if not self._has_begun:  # nothing has been trained, so there is nothing to save
            error = f"{signals.first.name} before the trainer had started"
            return RunOutcome(exit_code=signals.exit_code, error=error)
        self._site.send("stop")
        self._display.phase("stopping")
        what = ": finishing the step and saving a checkpoint" if self._assignment.purpose == "train" else ""
        self._display.note(f"stopping{what} (press Ctrl-C again to stop immediately)")
        self._servers.stop_restarting()
        await self._wait(timeout_s=timeout_s)
        if self._training.done():
            return await self._finish(exit_code=signals.exit_code)
        is_second = signals.arrived.is_set()
        reason = "a second signal" if is_second else f"it did not stop within launch.stop_timeout_s: {timeout_s:g} s"
        error = f"{signals.first.name}: the trainer was killed ({reason})\n{self._how_to_continue()}"
        return RunOutcome(exit_code=signals.exit_code, error=error)

    async def _finish(self, *, exit_code: int) -> RunOutcome:
        """The trainer has ended by itself, on one machine at least; end the servers and say how it went."""
        await asyncio.wait([trainer.exited for trainer in self._trainers], timeout=_OTHERS_TIMEOUT_S)
        await self._site.read_the_rest()
        failed = self._training.result()
        outcome = RunOutcome(exit_code=exit_code, summary=self._summary)
        if failed is not None:
            outcome = self._failed(self._trainer_failure(failed))
        elif self._summary is None and exit_code == 0:  # stopped before the first step, it has none
            outcome = self._failed(f"the trainer ended without a summary\n{self._trainers[0].describe_end()}")
        await self._servers.end(self._signals)
        return outcome

    def _trainer_failure(self, failed: Child) -> str:
        """`failed` is the first that ended without success."""
        lost = next((trainer for trainer in self._trainers if trainer.is_lost), None)
        if lost is not None:  # which explains every failure of a rank
            return f"{lost.name} {lost.end}"
        cause = self._explain()
        if not cause or failed.exited.result() < 0:
            return "\n".join(filter(None, [cause, f"the {failed.describe_end()}"]))
        return f"{cause}\nlog: {failed.log}"

    def _explain(self) -> str | None:
        cause = explain(self._ends)
        if cause is None:
            return None
        if len(self._trainers) == 1:
            return cause.text
        return f"{cause.text}\non {self._trainers[cause.rank // self._config.launch.num_trainer_ranks].name}"

    def _fail(self, failure: str, *, can_save: bool = False) -> None:
        """The run cannot continue; the first reason counts. `can_save`: the trainer may save when it is asked to."""
        if not self._trouble.is_set():
            self._failure, self._can_save = plain(failure), can_save
            self._trouble.set()

    def _failed(self, what: str) -> RunOutcome:
        if (lost := lost_run_dir(self._assignment)) is not None:
            return RunOutcome(exit_code=1, error=lost)
        # where all rewards are equal, a resume of the same run would end in the same way
        how = "" if read_equal_rewards(what) is not None else self._how_to_continue()
        has_lost_a_node = any(trainer.is_lost for trainer in self._trainers)
        return RunOutcome(exit_code=1, error="\n".join(filter(None, [what, how])), has_lost_a_node=has_lost_a_node)

    def _how_to_continue(self) -> str:
        if self._assignment.purpose != "train":
            return ""
        run_dir = self._assignment.run_dir
        steps = run_dir.checkpoint_steps()
        if not steps:
            clean = " with --clean" if run_dir.has_steps() else ""
            return f"there is no checkpoint yet; the same command{clean} begins again"
        command = shlex.join(["grpo-async", "train", str(run_dir.config), "--resume", "latest"])
        return f"the newest checkpoint is step {steps[-1]}; continue with: {command}"

    def _on_message(self, message: Mapping[str, Any]) -> None:
        content = {name: value for name, value in message.items() if name != "kind"}
        match message["kind"]:
            case "phase" | "step" | "evaluation" | "servers" | "note" | "warning" | "example" | "preflight" as kind:
                self._has_begun = True
                self._display.show(kind, **content)
            case "server_serving" | "restart_server":
                self._servers.receive(message)
            case "silent":
                self._fail(content["text"], can_save=content["is_back"])
            case "stalled":
                self._fail(content["text"], can_save=True)
            case "end":
                self._ends.append(RankEnd(**content["end"]))
            case "summary":
                self._summary = content["summary"]
            case _:
                self._display.warning(f"the trainer sent an unknown message: {str(message)[:200]}")


async def _first_failure(children: Sequence[Child]) -> Child | None:
    """Wait until all have ended with success (None), or return the first without."""
    running = {child.exited for child in children}
    while running:
        _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)  # as long as the run takes
        for child in children:
            if not child.is_running and child.exited.result() != 0:
                return child
    return None


def explain(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return how the rank ended that failed first; None when nothing was reported. The earliest error is the cause of the others,
    unless a signal ended a rank before it could say anything. Having seen one end, the agent ends the others by SIGTERM, so that
    signal counts for the first one only. The text is safe to print: errors quote what models and tools wrote."""
    ends = [replace(end, text=plain(end.text)) for end in sorted(ends, key=lambda end: end.time)]
    errors, exits = [end for end in ends if end.error is not None], [end for end in ends if end.error is None]
    reported = {end.rank for end in errors}
    for index, end in enumerate(exits):
        is_killed = end.status < 0 and end.rank not in reported and (index == 0 or end.status != -signal.SIGTERM)
        if is_killed and (not errors or errors[0].time > end.time - _NOTICE_S):
            after = f"\nafter that rank {errors[0].rank} reported: {plain(str(errors[0].error))}" if errors else ""
            return replace(end, text=end.text + after)
        if is_killed:
            break
    return errors[0] if errors else None
