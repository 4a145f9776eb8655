"""Runs a plan to its end: starts the children, shows what they report, and leaves no process behind however it ends.

    waits for   the first of: trainer exit, server exit, a signal; every later wait has a deadline
    outcome     trainer exits 0 with a summary -> 0; anything ends too early -> 1, with who, how and its last words;
                SIGINT -> 130, SIGTERM and SIGHUP -> 143, after a checkpoint when the trainer manages in time

The first failure wins: what dies after it is a consequence and not reported. Afterwards everything that was started,
and everything that those started, is ended: SIGTERM with a grace, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_async.launch.child import Child
from grpo_async.launch.control import ControlServer
from grpo_async.launch.display import Display
from grpo_async.launch.failures import explain
from grpo_async.launch.plan import ProcessPlan
from grpo_async.launch.tree import ProcessTree, adopting_orphans

_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_KILL_TIMEOUT_S = 10.0  # for SIGKILL to take effect
_DRAIN_TIMEOUT_S = 5.0  # for the last messages of a trainer that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. `error` is for the user, several lines; `summary` is the content of summary.json."""

    exit_code: int
    error: str | None = None
    summary: Mapping[str, Any] | None = None


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

    def __init__(self, plan: ProcessPlan, display: Display, *, stop_timeout_s: float) -> None:
        self._plan = plan
        self._display = display
        self._stop_timeout_s = stop_timeout_s
        self._children: list[Child] = []
        self._summary: Mapping[str, Any] | None = None
        self._reported_failure: str | None = None

    async def run(self) -> Outcome:
        """Start, watch, end. Call it from the main thread (signals; the children's death signal)."""
        self._signals = Signals()
        with self._signals.installed(), adopting_orphans():
            tree = ProcessTree()
            try:
                async with ControlServer(
                    self._plan.places.control_socket, self._on_message, self._display.note
                ) as control:
                    return await self._supervise(control)
            finally:
                for process in await tree.kill(_KILL_TIMEOUT_S):
                    self._display.note(f"process {process.pid} does not end even by SIGKILL (stuck in the kernel)")
                if self._children:
                    await asyncio.wait([child.exited for child in self._children], timeout=_KILL_TIMEOUT_S)

    async def _supervise(self, control: ControlServer) -> Outcome:
        server = None if self._plan.server is None else await self._spawn(self._plan.server.name)
        trainer = await self._spawn(self._plan.trainer.name)
        await self._first_of(trainer, server)
        if self._signals.arrived.is_set() and trainer.is_running:
            return await self._stop(control, trainer, server)
        if server is not None and not server.is_running and (trainer.is_running or trainer.exited.result() != 0):
            # both at once: a dead server ends the trainer, never the other way round
            self._display.phase("the server has ended: ending the trainer")
            await self._end(trainer)
            return self._failed(f"the {server.describe_end()}")
        return await self._finish(control, trainer, server, exit_code=0)

    async def _spawn(self, name: str) -> Child:
        spec = next(spec for spec in self._plan.processes if spec.name == name)
        child = await Child.spawn(spec, self._plan.places.attempt)
        self._children.append(child)
        return child

    async def _stop(self, control: ControlServer, trainer: Child, server: Child | None) -> Outcome:
        signals = self._signals
        assert signals.first is not None
        code, name = signals.exit_code, signals.first.name
        signals.arrived.clear()
        if not control.has_connected:  # nothing has been trained, so there is nothing to save
            return Outcome(exit_code=code, error=f"{name} before the trainer had begun")
        control.request_stop(name)
        self._display.phase("stopping")
        self._display.note("stopping: finishing the step and saving a checkpoint (press Ctrl-C again to end at once)")
        await self._first_of(trainer, timeout_s=self._stop_timeout_s)  # a server that ends now is no loss
        if not trainer.is_running:
            return await self._finish(control, trainer, server, exit_code=code)
        reason = (
            "a second signal"
            if signals.arrived.is_set()
            else f"it did not end within launch.stop_timeout_s: {self._stop_timeout_s:g} s"
        )
        return Outcome(exit_code=code, error=f"{name}: the trainer was killed ({reason})\n{self._how_to_continue()}")

    async def _finish(self, control: ControlServer, trainer: Child, server: Child | None, *, exit_code: int) -> Outcome:
        """The trainer has ended by itself; end the server and say how it went."""
        await control.drain(_DRAIN_TIMEOUT_S)
        status = trainer.exited.result()
        # stopped before the first step, it has nothing to sum up
        lacks_summary = self._summary is None and exit_code == 0
        failure = self._trainer_failure(trainer) if status != 0 or lacks_summary else None
        if server is not None:
            await self._end(server)
        if failure is not None:
            return self._failed(failure)
        return Outcome(exit_code=exit_code, summary=self._summary)

    def _trainer_failure(self, trainer: Child) -> str:
        status = trainer.exited.result()
        if status == 0:
            return f"the trainer ended without a summary\n{trainer.describe_end()}"
        words = explain(self._plan.places.attempt) or self._reported_failure
        if words is None or status < 0:
            return "\n".join(filter(None, [words, f"the {trainer.describe_end()}"]))
        return f"{words}\nlog: {trainer.log}"

    def _failed(self, what: str) -> Outcome:
        return Outcome(exit_code=1, error=f"{what}\n{self._how_to_continue()}")

    def _how_to_continue(self) -> str:
        run_dir = self._plan.places.run_dir
        steps = run_dir.checkpoint_steps()
        if not steps:
            return "there is no checkpoint yet; begin again with --clean"
        return f"the newest checkpoint is step {steps[-1]}; go on with: grpo-async train {run_dir.config} --resume auto"

    async def _end(self, child: Child) -> None:
        """SIGTERM and wait; a signal to the launcher cuts the grace short. What is left is killed with the tree."""
        self._signals.arrived.clear()
        child.terminate()
        await self._first_of(child, timeout_s=_GRACE_S)

    async def _first_of(self, *children: Child | None, timeout_s: float | None = None) -> None:
        """Until one of the children ends or a signal arrives. Without `timeout_s` as long as the run takes: the trainer
        has deadlines for everything that it waits for, and a run has no other natural bound."""
        arrived = asyncio.ensure_future(self._signals.arrived.wait())
        exits = [child.exited for child in children if child is not None]
        try:
            await asyncio.wait([arrived, *exits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()

    def _on_message(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"kind": "phase", "name": str(name)}:
                self._display.phase(name)
            case {"kind": "step", "step": int(step), "max_steps": int(max_steps), "metrics": dict(metrics)}:
                self._display.step(step, max_steps, metrics)
            case {"kind": "evaluation", "when": str(when), "metrics": dict(metrics)}:
                self._display.evaluation(when, metrics)
            case {"kind": "summary", "summary": dict(summary)}:
                self._summary = summary
            case {"kind": "failed", "rank": rank, "error": error}:
                self._reported_failure = f"trainer rank {rank} failed: {error}"
            case _:
                self._display.note(f"the trainer sent a message that nobody knows: {str(dict(message))[:200]}")
