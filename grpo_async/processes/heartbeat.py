"""The trainer's end of `launcher.liveness`: each of its processes says, every second, that its interpreter runs, and how it fails.

A thread sends the heartbeats, and a thread gets the interpreter every few milliseconds whatever else computes: so they are missing
of a process that is stopped, or of which one thread holds the interpreter (a regular expression that backtracks, C code that never
comes back), and of no other. Datagrams, so that nobody waits for the launcher and no disk is needed. When the launcher sends
STACKS_SIGNAL, the stacks of all threads are written by a signal handler in C, which needs no interpreter. No torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_async.processes.failures import RankExit, RankFailure, Report

STACKS_SIGNAL = signal.SIGUSR2
INTERVAL_S = 1.0
ELASTIC_AGENT = "torchrun"
"""Name of the process that has the ranks as its children."""
MAX_DATAGRAM = 1 << 18
_REPORT_TIMEOUT_S = 2.0


def stacks_file(heartbeat: Path, pid: int) -> Path:
    """Where process `pid` writes its stacks: next to the socket, not on a disk that a run fills."""
    return heartbeat.with_name(f"stacks_{pid}")


def report(path: Path, *reports: Report) -> None:
    """Tell the launcher, whose socket is `path`, how ranks end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_DATAGRAM)
        connection.settimeout(_REPORT_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the launcher is gone, or does not listen
            for each in reports:
                connection.sendto(json.dumps(asdict(each)).encode(), str(path))


def from_json(message: Mapping[str, Any]) -> Report:
    """A report that was sent: {"kind": "exit", "rank": 1, ...}."""
    return (RankExit if message["kind"] == "exit" else RankFailure)(**message)


class Heartbeat:
    """Of this process, from construction on.

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
        with contextlib.suppress(BlockingIOError):
            self._socket.send(self._message, socket.MSG_DONTWAIT)  # from here on it is known, and judged
        threading.Thread(target=self._send, name="heartbeat", daemon=True).start()

    def _send(self) -> None:
        never = threading.Event()
        while True:  # ends with the process
            with contextlib.suppress(BlockingIOError, InterruptedError):  # the launcher has not read the last ones yet
                try:
                    self._socket.send(self._message, socket.MSG_DONTWAIT)
                except ConnectionError:
                    return  # the launcher is gone, and this process goes with it
            never.wait(INTERVAL_S)
