"""What every process of the trainer tells the launcher beside its work: that it lives, and how ranks end. Imports no torch.

A process that stood still writes the stacks of all threads into its log when it goes on; one in which code holds the GIL does so
in a signal handler in C, when the launcher asks (STACKS_SIGNAL).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
import traceback
from dataclasses import asdict, dataclass

from grpo_async.errors import GrpoAsyncError, message_of
from grpo_async.processes.control import ControlClient
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.text import clipped

STACKS_SIGNAL = signal.SIGUSR2
INTERVAL_S = 1.0
_STDERR = 2  # whatever user code puts in the place of sys.stderr
_TRACEBACK_LINES = 16
_MAX_CHARS = 8_000


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
