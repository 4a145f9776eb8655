"""Watches from outside that the trainer's processes live: each gives a sign of life every second (processes.heartbeat).

After 30 s without one the user is warned, and after `launch.heartbeat_timeout_s` the run fails with its name, and with the place
in the code where its threads are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from grpo_async.processes.heartbeat import INTERVAL_S, STACKS_SIGNAL
from grpo_async.utils.processes import is_running

_WARNING_S = 30.0
_OWN_PAUSE_S = 5.0
"""This process stood still itself (Ctrl-Z, a scheduler that suspends the job): nobody else was silent meanwhile."""
_STACKS_S = 3.0  # for the stacks to be written, and for a process that was stopped to give a sign of life
_MAX_FRAMES = 12


@dataclass(slots=True)
class _Process:
    """`seen_at` is the time of its last sign of life on the monotonic clock."""

    name: str
    pid: int
    seen_at: float
    is_warned_of: bool = False

    def describe(self, now: float) -> str:
        return (
            f"{self.name} (pid {self.pid}) has given no sign of life for {now - self.seen_at:.0f} s: it was stopped "
            "(SIGSTOP), or some code in it holds the GIL"
        )


class Watcher:
    """Judges processes by their signs of life.

    Args:
        log: of the processes, into which they write their stacks.
        fail: gets the failure, and whether the process is back and may save when it is asked to.
        warn: tells the user.
    """

    def __init__(
        self, timeout_s: float, log: Path, fail: Callable[[str, bool], None], warn: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._log = log
        self._fail = fail
        self._warn = warn
        self._processes: dict[int, _Process] = {}

    def see(self, message: Mapping[str, Any]) -> None:
        """Take a sign of life."""
        self._processes[message["pid"]] = _Process(message["name"], message["pid"], time.monotonic())

    async def watch(self) -> None:
        """Look every second, until a process is given up."""
        looked_at, has_failed = time.monotonic(), False
        while not has_failed:
            await asyncio.sleep(INTERVAL_S)  # back-off until the next look; cancelled with the run
            now = time.monotonic()
            if now - looked_at > INTERVAL_S + _OWN_PAUSE_S:
                for process in self._processes.values():
                    process.seen_at = now
            looked_at = now
            for process in list(self._processes.values()):
                has_failed = has_failed or await self._check(process, now)

    async def _check(self, process: _Process, now: float) -> bool:
        """Return whether the process is given up."""
        silent_s = now - process.seen_at
        if silent_s < INTERVAL_S:
            return False
        if not is_running(process.pid):  # others say how it has ended
            del self._processes[process.pid]
        elif silent_s >= self._timeout_s:
            text, written = process.describe(now), self._log.stat().st_size
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                # one that was stopped writes its stacks when it goes on (processes.heartbeat)
                if psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                    os.kill(process.pid, STACKS_SIGNAL)
                os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(_STACKS_S)  # back-off: for the process to be back, if it was only stopped
            how = "Raise `launch.heartbeat_timeout_s` if this is expected; a reward that computes for long may `run_in: process`."
            is_back = self._processes[process.pid].seen_at > process.seen_at
            self._fail("\n".join([text, *self._places(written), how]), is_back)
            return True
        elif silent_s >= min(_WARNING_S, self._timeout_s / 2) and not process.is_warned_of:
            process.is_warned_of = True
            limit = f"the run ends after {self._timeout_s:g} s (launch.heartbeat_timeout_s)"
            self._warn(f"{process.describe(now)}; {limit}")
        return False

    def _places(self, written: int) -> list[str]:
        """Return lines that say where threads are, in code that is no library's, by what the log has beyond `written` bytes."""
        stacks = self._log.read_bytes()[written:].decode(errors="replace")
        libraries = (sysconfig.get_path("stdlib"), "site-packages", "<frozen")
        frames: dict[str, None] = {}  # each once, in order
        for thread in stacks.split("\n\n"):
            lines = [line for line in thread.splitlines() if line.startswith("  File ")]
            own = [line for line in lines if not any(library in line for library in libraries)]
            frames.update(dict.fromkeys(own[:1]))
        shown = list(frames)[:_MAX_FRAMES]
        return ["its threads are in:", *shown, f"the stacks of all its threads: {self._log}"] if shown else []
