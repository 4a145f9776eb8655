"""What every process of the trainer tells the launcher beside its work: that it lives, and how ranks end; and the launcher's watch
over it. Imports no torch.

After 30 s without a sign of life the user is warned, and after `launch.heartbeat_timeout_s` the run fails with the name of the
process, and with the place in the code where its threads are. A process that stood still writes the stacks of all threads into its
log when it goes on; one in which code holds the GIL does so in a signal handler in C, when the launcher asks (STACKS_SIGNAL).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from grpo_async.errors import GrpoAsyncError, message_of
from grpo_async.processes.control import ControlClient
from grpo_async.utils.processes import describe_exit, is_running
from grpo_async.utils.text import clipped

STACKS_SIGNAL = signal.SIGUSR2
INTERVAL_S = 1.0
_STDERR = 2  # whatever user code puts in the place of sys.stderr
_TRACEBACK_LINES = 16
_MAX_CHARS = 8_000
_WARNING_S = 30.0
_OWN_PAUSE_S = 5.0
"""The launcher stood still itself (Ctrl-Z, a scheduler that suspends the job): nobody else was silent meanwhile."""
_STACKS_S = 3.0  # for the stacks to be written, and for a process that was stopped to give a sign of life
_MAX_FRAMES = 12


def keep_alive(control: ControlClient, name: str, *, timeout_s: float) -> None:
    """Give a sign of life every second from now on. `name`: of this process, for the user ("trainer rank 0")."""
    faulthandler.enable(_STDERR)  # a crash in native code leaves its stacks in the log
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
    control.send("alive", name=name, pid=os.getpid())  # from here on it is known, and judged

    def beat() -> None:
        while True:  # ends with the process
            slept_at = time.monotonic()
            time.sleep(INTERVAL_S)
            if time.monotonic() - slept_at > timeout_s / 2:
                write_stacks()
            control.send("alive", name=name, pid=os.getpid())

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def write_stacks() -> None:
    """Write the stacks of all threads into the log. No other one runs meanwhile, so it cannot crash, as the signal could in a
    process that goes on (CPython issue 116008)."""
    faulthandler.dump_traceback(_STDERR, all_threads=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank ended, at `time` in seconds since the epoch: by an error that it raised, or with an exit status (-9: killed by
    signal 9) that torchrun's agent has noticed. `text`, for the user, has the traceback of an error not raised on purpose."""

    rank: int
    time: float
    text: str
    error: str | None = None
    status: int = 0

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> RankEnd:
        message = clipped(message_of(error), _MAX_CHARS)
        lines = [f"trainer rank {rank} failed: {message}"]
        if not isinstance(error, GrpoAsyncError):
            trace = "".join(traceback.format_exception(error))[-_MAX_CHARS:]
            lines += ["  " + line for line in trace.rstrip().splitlines()[-_TRACEBACK_LINES:]]
        return cls(rank=rank, time=time.time(), text="\n".join(lines), error=message)

    @classmethod
    def of_status(cls, rank: int, status: int, pid: int, at: float) -> RankEnd:
        return cls(rank=rank, time=at, text=f"trainer rank {rank} (pid {pid}) {describe_exit(status)}", status=status)

    def report(self, control: ControlClient) -> None:
        control.send("end", end=asdict(self))


# ---- the launcher's watch ----


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
                # one that was stopped writes its stacks when it goes on
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
