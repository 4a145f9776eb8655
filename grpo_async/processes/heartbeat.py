"""What the processes of the trainer tell the launcher beside their work: that they live, and how they fail.

Heartbeats   of each process, every second, and the progress of rank 0 (launch.watcher judges both). A process that stands still
             writes the stacks of all threads: by itself, or where code holds the GIL in a signal handler in C (STACKS_SIGNAL).
Ends         A rank that raises reports its error, torchrun's agent the exit status of each rank that failed.

All are datagrams, so that nobody waits for the launcher and no disk is needed. Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_async.errors import GrpoAsyncError, message_of
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.text import clipped

STACKS_SIGNAL = signal.SIGUSR2
INTERVAL_S = 1.0
_PAUSE_S = 3.0  # between two heartbeats; the process was stopped, or some code held the GIL
MAX_DATAGRAM = 1 << 18
_REPORT_TIMEOUT_S = 2.0
_TRACEBACK_LINES = 16
_MAX_CHARS = 8_000  # of each text: a datagram has its limit


def stacks_file(heartbeat: Path, pid: int) -> Path:
    """Where process `pid` writes its stacks: next to the socket, not on a disk that a run fills."""
    return heartbeat.with_name(f"stacks_{pid}")


class Heartbeat:
    """Heartbeat of this process, from construction on.

    Args:
        name: of the process, for the user ("trainer rank 0").
        path: of the launcher's socket.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._path = path
        self._message = json.dumps({"kind": "heartbeat", "name": name, "pid": os.getpid()}).encode()
        self._stacks = stacks_file(path, os.getpid()).open("w", encoding="utf-8")  # open as long as the process
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(str(path))  # a datagram socket only keeps the address
        with contextlib.suppress(OSError):
            self._socket.send(self._message, socket.MSG_DONTWAIT)  # from here on it is known, and judged
        threading.Thread(target=self._send, name="heartbeat", daemon=True).start()

    def _send(self) -> None:
        sent_at = time.monotonic()
        while True:  # ends with the process
            if time.monotonic() - sent_at > _PAUSE_S:
                _write_stacks(self._path)
            sent_at = time.monotonic()
            try:
                self._socket.send(self._message, socket.MSG_DONTWAIT)
            except ConnectionError:
                return  # the launcher is gone, and this process goes with it
            except OSError:  # the launcher has not read the last ones yet (Linux: EAGAIN, macOS: ENOBUFS)
                pass
            time.sleep(INTERVAL_S)


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
    def of_error(cls, rank: int, error: BaseException, name: str = "trainer rank") -> RankEnd:
        """The end of a rank that `error` ends now. `name`: of the process without its number, as in its log."""
        message = clipped(message_of(error), _MAX_CHARS)
        lines = [f"{name} {rank} failed: {message}"]
        if not isinstance(error, GrpoAsyncError):
            trace = "".join(traceback.format_exception(error))[-_MAX_CHARS:]
            lines += ["  " + line for line in trace.rstrip().splitlines()[-_TRACEBACK_LINES:]]
        return cls(rank=rank, time=time.time(), text="\n".join(lines), error=message)

    @classmethod
    def of_status(cls, rank: int, status: int, pid: int, at: float) -> RankEnd:
        return cls(rank=rank, time=at, text=f"trainer rank {rank} (pid {pid}) {describe_exit(status)}", status=status)


def report_progress(path: Path, unchanged_s: float, text: str) -> None:
    """Tell the launcher for how long the run has made no progress, and what waits for what."""
    _write_stacks(path)  # should that be too long
    _send(path, {"kind": "progress", "pid": os.getpid(), "unchanged_s": unchanged_s, "text": clipped(text, _MAX_CHARS)})


def report(path: Path, *ends: RankEnd) -> None:
    """Tell the launcher, whose socket is `path`, how ranks end."""
    _send(path, *({"kind": "end", "end": asdict(end)} for end in ends))


def _write_stacks(heartbeat: Path) -> None:
    """Write the stacks of all threads. No other one runs meanwhile, so it cannot crash, as the signal could in a process that goes
    on (CPython issue 116008)."""
    with contextlib.suppress(OSError), stacks_file(heartbeat, os.getpid()).open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _send(path: Path, *messages: Mapping[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_DATAGRAM)
        connection.settimeout(_REPORT_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the launcher is gone, or does not listen
            for message in messages:
                connection.sendto(json.dumps(message).encode(), str(path))
