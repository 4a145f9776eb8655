"""Judges from outside whether the processes of the trainer live: a watcher inside stands still while another thread holds the GIL.

    every second   the last heartbeat (processes.heartbeat) of each process that has ever sent one is compared with the clock
    30 s           a warning names the silent process, and what the kernel says of it
    at the limit   `launch.heartbeat_timeout_s`: its stacks are written, `frozen` is set, and the supervisor ends the run

A long step, a compile, a slow disk or an evaluation do not hold the GIL for so long. `trainer.stall` handles what stands still
with the GIL free.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import psutil

from grpo_async.processes.assignment import Assignment
from grpo_async.processes.heartbeat import (
    ELASTIC_AGENT,
    INTERVAL_S,
    MAX_DATAGRAM,
    STACKS_SIGNAL,
    Cause,
    Report,
    explain,
    from_json,
    stacks_file,
)
from grpo_async.utils.safe_text import plain

_NOTICE_S = 30.0
_MIN_SILENCE_S = 3.0
"""A heartbeat that is late by less is not silence: the machine may be busy."""
_OWN_PAUSE_S = 5.0
"""The launcher itself stood still (Ctrl-Z, a scheduler that suspends the whole job): that time does not count as silence."""
_BUSY_SAMPLE_S = 0.5
_STACKS_S = 5.0
_MAX_FRAMES = 12


@dataclass(slots=True)
class _Watched:
    """One process. `last_at` by time.monotonic(); `status` is psutil's, of the time of its silence."""

    name: str
    pid: int
    last_at: float
    status: str = ""
    silent_s: float = 0.0
    is_told: bool = False

    @property
    def is_stopped(self) -> bool:
        return self.status == psutil.STATUS_STOPPED

    def describe(self) -> str:
        return f"{self.name} (pid {self.pid}) has sent no heartbeat for {self.silent_s:.0f} s: {_WHY.get(self.status, _HELD)}"


_HELD = "one of its threads holds the GIL and does not release it"
_WHY: Mapping[str, str] = {
    psutil.STATUS_STOPPED: "it is stopped by a signal (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "a debugger holds it",
    psutil.STATUS_DISK_SLEEP: "it is stuck in the kernel, waiting for a disk or a device",
}


class Liveness:
    """Listens to the heartbeats of the trainer's processes. An async context manager.

    Args:
        assignment: has the socket to listen at, and the folder for the stacks of what is frozen.
        timeout_s: the longest silence of a process that lives.
        warn: tells the user.
    """

    def __init__(self, assignment: Assignment, timeout_s: float, warn: Callable[[str], None]) -> None:
        self._path = assignment.heartbeat_socket
        self._timeout_s = timeout_s
        self._logs = assignment.attempt_dir
        self._warn = warn
        self._watched: dict[int, _Watched] = {}
        self.frozen = asyncio.Event()
        self.failure: str | None = None
        """Who is frozen, how, and where in its code; None until `frozen`."""
        self.can_save = False
        """Whether what is frozen can save when it is asked to: it was stopped, and has been continued, or it is torchrun."""
        self.reports: list[Report] = []
        """What ranks and torchrun said of the end of ranks; of other machines, too, where this one leads."""

    async def __aenter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self._path))
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def silent(self) -> str | None:
        """The process that was silent already when the trainer ended, and so is the cause; None: there was none."""
        known = [
            watched
            for watched in self._watched.values()
            if watched.is_stopped or watched.silent_s >= min(_NOTICE_S, self._timeout_s)
        ]
        longest = max(known, key=lambda watched: watched.silent_s, default=None)
        return None if longest is None else longest.describe()

    def explain(self) -> Cause | None:
        """Which rank failed first and why; None: none has said anything."""
        self._receive()
        return explain(self.reports)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:  # until nothing is left
                message = json.loads(self._socket.recv(MAX_DATAGRAM))  # does not block
                if message["kind"] != "heartbeat":
                    self.reports.append(from_json(message))
                    continue
                watched = self._watched.setdefault(message["pid"], _Watched(message["name"], message["pid"], 0.0))
                watched.last_at, watched.silent_s = time.monotonic(), 0.0

    async def _watch(self) -> None:
        checked_at = time.monotonic()
        while not self.frozen.is_set():
            await asyncio.sleep(INTERVAL_S)  # back-off until the next look; cancelled with the run
            self._receive()
            now = time.monotonic()
            if now - checked_at > INTERVAL_S + _OWN_PAUSE_S:
                for watched in self._watched.values():
                    watched.last_at = now
            checked_at = now
            for watched in list(self._watched.values()):
                await self._check(watched, now)

    async def _check(self, watched: _Watched, now: float) -> None:
        silent_s = now - watched.last_at
        if silent_s < _MIN_SILENCE_S:
            if watched.is_told:
                watched.is_told = False
                self._warn(f"{watched.name} (pid {watched.pid}) is responsive again")
            return
        try:
            status = psutil.Process(watched.pid).status()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_ZOMBIE
        if status == psutil.STATUS_ZOMBIE:  # it has ended: others say how
            if watched.silent_s < _MIN_SILENCE_S:
                del self._watched[watched.pid]
            return
        watched.silent_s, watched.status = silent_s, status
        if silent_s >= self._timeout_s:
            await self._declare_frozen(watched)
        elif silent_s >= min(_NOTICE_S, self._timeout_s / 2) and not watched.is_told:
            watched.is_told = True
            self._warn(f"{watched.describe()}; the run ends after {self._timeout_s:g} s (launch.heartbeat_timeout_s)")

    async def _declare_frozen(self, watched: _Watched) -> None:
        stacks = await self._stacks_of(watched)
        if watched.is_stopped:
            advice = f"It was resumed so that it can save. `kill -CONT {watched.pid}` in time would have let the run continue"
        elif watched.status in _WHY:
            advice = ""
        else:
            advice = (
                "A reward that can compute for that long belongs in `run_in: process`, where its time limit applies"
            )
        lines = [
            watched.describe(),
            *([] if stacks is None else self._keep(watched, stacks)),
            ". ".join(filter(None, [advice, "Raise `launch.heartbeat_timeout_s` if this is expected"])) + ".",
        ]
        self.failure = plain("\n".join(lines))
        self.can_save = watched.is_stopped or watched.name == ELASTIC_AGENT
        self.frozen.set()

    async def _stacks_of(self, watched: _Watched) -> str | None:
        """The stacks of a process's threads, the one that computes as the current one; None where it cannot write them. A process
        that is stopped is continued: it writes them first."""
        file = stacks_file(self._path, watched.pid)
        try:
            thread = watched.pid if watched.is_stopped else await _busiest_thread(watched.pid)
            _signal_thread(watched.pid, thread, STACKS_SIGNAL)
            if watched.is_stopped:
                os.kill(watched.pid, signal.SIGCONT)
            ends_at, size = time.monotonic() + _STACKS_S, -1
            while time.monotonic() < ends_at and (size <= 0 or file.stat().st_size != size):
                size = file.stat().st_size
                await asyncio.sleep(_BUSY_SAMPLE_S)  # back-off, _STACKS_S at most
            return file.read_text(encoding="utf-8", errors="replace") or None
        except (OSError, psutil.Error):
            return None

    def _keep(self, watched: _Watched, stacks: str) -> list[str]:
        """The lines of `stacks` that say where the process is; all of `stacks` goes to the logs."""
        current = next((part for part in stacks.split("\n\n") if part.startswith("Current thread")), stacks)
        frames = [line for line in current.splitlines() if line.startswith("  File ")]
        lines = ["where it is (most recent call first):", *("  " + frame for frame in frames[:_MAX_FRAMES])]
        target = self._logs / f"stacks_{watched.name.replace(' ', '_')}.txt"
        with contextlib.suppress(OSError):  # a full disk: the message has what matters
            shutil.copyfile(stacks_file(self._path, watched.pid), target)
            lines.append(f"the stacks of all its threads: {target}")
        return lines


async def _busiest_thread(pid: int) -> int:
    """The thread that has computed most in half a second: one that waits for the GIL computes next to nothing."""
    process = psutil.Process(pid)
    before = _thread_times(process)
    await asyncio.sleep(_BUSY_SAMPLE_S)
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in _thread_times(process).items()}
    return max(spent, key=lambda thread: spent[thread], default=pid)


def _thread_times(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def _signal_thread(pid: int, thread: int, number: signal.Signals) -> None:
    """Send a signal to one thread, where the system can: the stacks then name it as the current one."""
    tgkill: Any = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, thread, int(number)) != 0:
        os.kill(pid, number)
