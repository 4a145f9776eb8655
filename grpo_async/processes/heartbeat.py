"""What the processes of the trainer tell the launcher beside their work: that they live, and how they fail. No torch.

Heartbeats   of each process, every second, and the progress of rank 0 (launcher.watcher judges both). When the launcher sends
             STACKS_SIGNAL, a signal handler in C writes the stacks of all threads, which needs no GIL.
Failures     A rank that raises reports a RankFailure; torchrun's agent reports a RankExit for each rank that failed. The earliest
             failure is the cause of the others, unless a rank was killed, which reports nothing.

All are datagrams, so that nobody waits for the launcher and no disk is needed.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grpo_async.errors import GrpoAsyncError, message_of
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import clipped

STACKS_SIGNAL = signal.SIGUSR2
INTERVAL_S = 1.0
ELASTIC_AGENT = "torchrun"
"""Name of the process that has the ranks as its children."""
MAX_DATAGRAM = 1 << 18
_REPORT_TIMEOUT_S = 2.0
_TRACEBACK_LINES = 16
_MAX_CHARS = 8_000  # of each text: a datagram has its limit
_NOTICE_S = 5.0  # the agent notices a death within this; it kills ranks that outlive its SIGTERM only after 30 s


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
        self._message = json.dumps({"kind": "heartbeat", "name": name, "pid": os.getpid()}).encode()
        self._stacks = stacks_file(path, os.getpid()).open("w", encoding="utf-8")  # open as long as the process
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(str(path))  # a datagram socket only keeps the address
        with contextlib.suppress(OSError):
            self._socket.send(self._message, socket.MSG_DONTWAIT)  # from here on it is known, and judged
        threading.Thread(target=self._send, name="heartbeat", daemon=True).start()

    def _send(self) -> None:
        while True:  # ends with the process
            try:
                self._socket.send(self._message, socket.MSG_DONTWAIT)
            except ConnectionError:
                return  # the launcher is gone, and this process goes with it
            except OSError:  # the launcher has not read the last ones yet (Linux: EAGAIN, macOS: ENOBUFS)
                pass
            time.sleep(INTERVAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a rank ended. `time` is seconds since the epoch, and `error` the text of message_of. `is_expected`: this package raised
    the error on purpose, so its traceback stays in the log. `name`: of the process without its number, as in its log."""

    rank: int
    time: float
    error: str
    traceback: str
    is_expected: bool
    name: str
    kind: Literal["failure"] = "failure"

    @classmethod
    def of(cls, rank: int, error: BaseException, name: str = "trainer rank") -> RankFailure:
        """The failure of a rank that `error` ends now."""
        trace = "".join(traceback.format_exception(error))
        return cls(
            rank=rank,
            time=time.time(),
            error=clipped(message_of(error), _MAX_CHARS),
            traceback=trace[-_MAX_CHARS:],
            is_expected=isinstance(error, GrpoAsyncError),
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank's process ended (-9: killed by signal 9); `time` is when the agent noticed, in whole seconds since the epoch."""

    rank: int
    pid: int
    time: float
    exit_code: int
    kind: Literal["exit"] = "exit"


Report = RankFailure | RankExit


class Cause(NamedTuple):
    """The rank that failed first, and a few lines for the user. Safe to print: errors quote what models and tools wrote."""

    rank: int
    text: str


def explain(reports: Sequence[Report]) -> Cause | None:
    """Which rank failed first and why; None when no rank and no agent reported anything."""
    failures = sorted((each for each in reports if isinstance(each, RankFailure)), key=lambda each: each.time)
    exits = sorted((each for each in reports if isinstance(each, RankExit)), key=lambda each: each.time)  # stable
    failure, killed = next(iter(failures), None), _killed_first(exits, {each.rank for each in failures})
    if killed is not None and (failure is None or failure.time > killed.time - _NOTICE_S):
        lines = [f"trainer rank {killed.rank} (pid {killed.pid}) {describe_exit(killed.exit_code)}"]
        if failure is not None:
            lines.append(f"after that rank {failure.rank} reported: {failure.error}")
        return Cause(killed.rank, plain("\n".join(lines)))
    if failure is None:
        return None
    lines = [f"{failure.name} {failure.rank} failed: {failure.error}"]
    if not failure.is_expected:
        lines += ["  " + line for line in failure.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]]
    return Cause(failure.rank, plain("\n".join(lines)))


def _killed_first(exits: Sequence[RankExit], reported: set[int]) -> RankExit | None:
    """The rank that a signal ended before it could say anything. Having seen one end, the agent ends the others by
    SIGTERM, so that signal counts for the first one only."""
    for index, each in enumerate(exits):
        is_silent = each.exit_code < 0 and each.rank not in reported
        if is_silent and (index == 0 or each.exit_code != -signal.SIGTERM):
            return each
    return None


def report_progress(path: Path, unchanged_s: float, text: str) -> None:
    """Tell the launcher for how long the run has made no progress, and what waits for what."""
    _send(path, {"kind": "progress", "pid": os.getpid(), "unchanged_s": unchanged_s, "text": clipped(text, _MAX_CHARS)})


def report(path: Path, *reports: Report) -> None:
    """Tell the launcher, whose socket is `path`, how ranks end."""
    _send(path, *map(asdict, reports))


def _send(path: Path, *messages: Mapping[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_DATAGRAM)
        connection.settimeout(_REPORT_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the launcher is gone, or does not listen
            for message in messages:
                connection.sendto(json.dumps(message).encode(), str(path))


def from_json(message: Mapping[str, Any]) -> Report:
    """A report that was sent: {"kind": "exit", "rank": 1, ...}."""
    return (RankExit if message["kind"] == "exit" else RankFailure)(**message)
