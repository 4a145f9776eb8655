"""Runs a plan to its end: starts the children, shows what they report, and leaves no process behind however it ends.

    waits for   the first of: trainer exit, loss of the servers (server_keeper restarts them), a signal; every later wait
                has a deadline
    outcome     trainer exits 0 with a summary -> 0; anything ends too early -> 1, with who, how and its last words;
                SIGINT -> 130, SIGTERM and SIGHUP -> 143, after a checkpoint when the trainer manages in time
                preflight only: 0 when no check failed, else 1

The first failure wins: what dies after it is a consequence and not reported. Afterwards everything that was started,
and everything that those started, is ended: SIGTERM with a grace, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from grpo_async.launch.child import Child
from grpo_async.launch.control import ControlServer
from grpo_async.launch.display import Display
from grpo_async.launch.failures import explain
from grpo_async.launch.plan import ProcessPlan, ProcessSpec
from grpo_async.launch.preflight_report import Check, Status
from grpo_async.launch.server_keeper import RestartRules, ServerEvent, ServerKeepers
from grpo_async.launch.tree import ProcessTree, adopting_orphans

_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_KILL_TIMEOUT_S = 10.0  # for SIGKILL to take effect
_DRAIN_TIMEOUT_S = 5.0  # for the last messages of a trainer that has ended
_KEEPER_TIMEOUT_S = 25.0  # for a restart that is under way to come to a point where it can be left


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. `error` is for the user, several lines; `summary` is the content of summary.json; `checks` are those
    of the preflight, None when they were not made."""

    exit_code: int
    error: str | None = None
    summary: Mapping[str, Any] | None = None
    checks: Sequence[Check] | None = None


class Signals:
    """SIGINT, SIGTERM and SIGHUP as an event of the loop. `arrived` may be cleared to wait for the next one."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.first: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """By the shell's convention, 128 + number; SIGHUP counts as SIGTERM."""
        return 130 if self.first is signal.SIGINT else 143

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
            caught.append(signal.SIGHUP)
        for number in caught:
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        self.first = self.first or number
        self.arrived.set()


class Supervisor:
    """One run of one plan. `stop_timeout_s` is the trainer's time to checkpoint after the first signal."""

    def __init__(self, plan: ProcessPlan, display: Display, *, stop_timeout_s: float, restarts: RestartRules) -> None:
        self._plan = plan
        self._display = display
        self._stop_timeout_s = stop_timeout_s
        self._restarts = restarts
        self._children: list[Child] = []
        self._summary: Mapping[str, Any] | None = None
        self._checks: list[Check] | None = None
        self._reported_failure: str | None = None

    async def run(self) -> Outcome:
        """Start, watch, end. Call it from the main thread (signals; the children's death signal)."""
        self._signals = Signals()
        with self._signals.installed(), adopting_orphans():
            tree = ProcessTree()
            self._servers = ServerKeepers(self._plan.servers, self, spawn=self._spawn, tree=tree, rules=self._restarts)
            try:
                async with ControlServer(
                    self._plan.places.control_socket, self._on_message, self._display.note
                ) as control:
                    self._control = control
                    return await self._supervise(control)
            finally:
                await self._servers.abandon(_KILL_TIMEOUT_S)
                for process in await tree.kill(_KILL_TIMEOUT_S):
                    self._display.note(f"process {process.pid} does not end even by SIGKILL (stuck in the kernel)")
                if self._children:
                    await asyncio.wait([child.exited for child in self._children], timeout=_KILL_TIMEOUT_S)

    async def _supervise(self, control: ControlServer) -> Outcome:
        servers = self._servers
        await servers.start()
        trainer = await self._spawn(self._plan.trainer)
        await self._first_of([trainer], servers.lost_all)
        if self._signals.arrived.is_set() and trainer.is_running:
            return await self._stop(control, trainer)
        servers.raise_errors()
        if servers.failure is not None and (trainer.is_running or trainer.exited.result() != 0):
            # both at once: lost servers end the trainer, never the other way round
            self._display.phase("no server is left: ending the trainer")
            if servers.have_served:  # the trainer saves the steps that it has made
                control.request_stop("no server is left")
                await self._first_of([trainer], timeout_s=self._stop_timeout_s)
            await self._end([trainer])
            return self._failed(servers.failure)
        return await self._finish(control, trainer, exit_code=0)

    async def _spawn(self, spec: ProcessSpec, life: int = 0) -> Child:
        child = await Child.spawn(spec, self._plan.places.attempt, life=life)
        self._children.append(child)
        return child

    async def _stop(self, control: ControlServer, trainer: Child) -> Outcome:
        signals = self._signals
        assert signals.first is not None
        code, name = signals.exit_code, signals.first.name
        signals.arrived.clear()
        if not control.has_connected:  # nothing has been trained, so there is nothing to save
            return Outcome(exit_code=code, error=f"{name} before the trainer had begun")
        control.request_stop(name)
        self._display.phase("stopping")
        self._display.note("stopping: finishing the step and saving a checkpoint (press Ctrl-C again to end at once)")
        stopping = asyncio.create_task(self._servers.stop(_KEEPER_TIMEOUT_S))  # a server that ends now is no loss
        try:
            await self._first_of([trainer], timeout_s=self._stop_timeout_s)
        finally:
            stopping.cancel()
            await asyncio.wait([stopping], timeout=_KILL_TIMEOUT_S)
        if not trainer.is_running:
            return await self._finish(control, trainer, exit_code=code)
        reason = (
            "a second signal"
            if signals.arrived.is_set()
            else f"it did not end within launch.stop_timeout_s: {self._stop_timeout_s:g} s"
        )
        return Outcome(exit_code=code, error=f"{name}: the trainer was killed ({reason})\n{self._how_to_continue()}")

    async def _finish(self, control: ControlServer, trainer: Child, *, exit_code: int) -> Outcome:
        """The trainer has ended by itself; end the servers and say how it went."""
        await control.drain(_DRAIN_TIMEOUT_S)
        outcome = self._judge(trainer, exit_code)
        await self._servers.stop(_KEEPER_TIMEOUT_S)
        await self._end(self._servers.running)
        return outcome

    def _judge(self, trainer: Child, exit_code: int) -> Outcome:
        status = trainer.exited.result()
        if self._plan.preflight_only and self._checks is not None and exit_code == 0:
            failed = [check.name for check in self._checks if check.status == "fail"]
            if failed:
                words = f"preflight: {len(failed)} of {len(self._checks)} checks failed: {', '.join(failed)}"
                return Outcome(exit_code=1, error=words, checks=self._checks)
            if status == 0:
                return Outcome(exit_code=0, checks=self._checks)
        # stopped before the first step, it has nothing to sum up
        lacks_summary = self._summary is None and exit_code == 0
        if status != 0 or lacks_summary:
            return self._failed(self._trainer_failure(trainer))
        return Outcome(exit_code=exit_code, summary=self._summary, checks=self._checks)

    def _trainer_failure(self, trainer: Child) -> str:
        status = trainer.exited.result()
        if status == 0:
            result = "the result of its checks" if self._plan.preflight_only else "a summary"
            return f"the trainer ended without {result}\n{trainer.describe_end()}"
        words = explain(self._plan.places.attempt) or self._reported_failure
        if words is None or status < 0:
            return "\n".join(filter(None, [words, f"the {trainer.describe_end()}"]))
        return f"{words}\nlog: {trainer.log}"

    def _failed(self, what: str) -> Outcome:
        return Outcome(exit_code=1, error="\n".join(filter(None, [what, self._how_to_continue()])))

    def _how_to_continue(self) -> str:
        if self._plan.preflight_only:
            return ""
        run_dir = self._plan.places.run_dir
        steps = run_dir.checkpoint_steps()
        if not steps:
            return "there is no checkpoint yet; begin again with --clean"
        return f"the newest checkpoint is step {steps[-1]}; go on with: grpo-async train {run_dir.config} --resume auto"

    async def _end(self, children: Sequence[Child]) -> None:
        """SIGTERM and wait; a signal to the launcher cuts the grace short. What is left is killed with the tree."""
        self._signals.arrived.clear()
        for child in children:
            child.terminate()
        ends_at = asyncio.get_running_loop().time() + _GRACE_S
        while (left := [child for child in children if child.is_running]) and not self._signals.arrived.is_set():
            left_s = ends_at - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            await self._first_of(left, timeout_s=left_s)

    async def _first_of(
        self, children: Iterable[Child], event: asyncio.Event | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Until one of the children ends, `event` is set or a signal arrives. Without `timeout_s` as long as the run takes:
        the trainer has deadlines for everything that it waits for, and a run has no other natural bound."""
        events = [self._signals.arrived, *([] if event is None else [event])]
        waits = [asyncio.ensure_future(event.wait()) for event in events]  # waits: cancelled a few lines below
        exits = [child.exited for child in children]
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait([*waits, *exits], timeout=timeout_s, return_when=first)  # waits: until the run ends
        finally:
            for wait in waits:
                wait.cancel()

    def server_event(self, index: int, event: ServerEvent, detail: str, life: int) -> None:
        """See ServerNews."""
        self._control.send_server_event(index, event, detail, life)

    def server_state(self, name: str, trouble: str | None) -> None:
        """See ServerNews."""
        self._display.server(name, trouble)

    def note(self, text: str) -> None:
        """See ServerNews."""
        self._display.note(text)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"kind": "phase", "name": str(name)}:
                self._display.phase(name)
            case {"kind": "step", "step": int(step), "max_steps": int(max_steps), "metrics": dict(metrics)}:
                self._display.step(step, max_steps, metrics)
            case {"kind": "evaluation", "when": str(when), "metrics": dict(metrics)}:
                self._display.evaluation(when, metrics)
            case {"kind": "preflight", "checks": list(checks)}:
                self._checks = [_read_check(check) for check in checks]
                self._display.preflight(self._checks)
            case {"kind": "server_serving", "index": int(index)}:
                self._servers.serves(index, message.get("life"))
            case {"kind": "restart_server", "index": int(index), "reason": str(reason)}:
                self._servers.ask_restart(index, reason, message.get("life"))
            case {"kind": "summary", "summary": dict(summary)}:
                self._summary = summary
            case {"kind": "failed", "rank": rank, "error": error}:
                self._reported_failure = f"trainer rank {rank} failed: {error}"
            case _:
                self._display.note(f"the trainer sent a message that nobody knows: {str(dict(message))[:200]}")


def _read_check(content: Any) -> Check:
    fields = content if isinstance(content, dict) else {}
    status = fields.get("status")
    return Check(
        name=str(fields.get("name", "?")),
        status=cast(Status, status) if status in get_args(Status) else "fail",
        detail=str(fields.get("detail", content)),
    )
