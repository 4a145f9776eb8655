"""The trainer's end of `launcher.liveness`: each of its processes says, every second, that its interpreter runs. No torch.

A thread sends the heartbeats, and a thread gets the interpreter every few milliseconds whatever else computes: so they are missing
of a process that is stopped, or of which one thread holds the interpreter (a regular expression that backtracks, C code that never
comes back), and of no other. Datagrams, so that nobody waits for the launcher and no disk is needed. When the launcher sends
STACKS_SIGNAL, the stacks of all threads are written by a signal handler in C, which needs no interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
from dataclasses import asdict, replace
from pathlib import Path

from grpo_async.processes.failures import RankFailure

STACKS_SIGNAL = signal.SIGUSR2
INTERVAL_S = 1.0
ELASTIC_AGENT = "torchrun"
"""Name of the process that has the ranks as its children."""
_MAX_TEXT = 8_000  # characters; a datagram has its limit
_FAILED_TIMEOUT_S = 2.0


def stacks_file(heartbeat: Path, pid: int) -> Path:
    """Where process `pid` writes its stacks: next to the socket, not on a disk that a run fills."""
    return heartbeat.with_name(f"stacks_{pid}")


class Heartbeat:
    """Of this process, from construction on.

    Args:
        name: of the process, for the user ("trainer rank 0").
        path: of the launcher's socket.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._stacks = stacks_file(path, os.getpid()).open("w", encoding="utf-8")  # open as long as the process
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(str(path))  # a datagram socket only keeps the address
        with contextlib.suppress(BlockingIOError):
            self._socket.send(self._message(), socket.MSG_DONTWAIT)  # from here on it is known, and judged
        threading.Thread(target=self._send, args=(self._socket,), name="heartbeat", daemon=True).start()

    def failed(self, failure: RankFailure) -> None:
        """Say why this process ends, for the case that no file can be written."""
        short = replace(failure, error=failure.error[:_MAX_TEXT], traceback=failure.traceback[-_MAX_TEXT:])
        self._socket.settimeout(_FAILED_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the launcher is gone, or does not listen
            self._socket.send(self._message(failed=asdict(short)))

    def _send(self, connection: socket.socket) -> None:
        never = threading.Event()
        while True:  # ends with the process
            with contextlib.suppress(BlockingIOError, InterruptedError):  # the launcher has not read the last ones yet
                try:
                    connection.send(self._message(), socket.MSG_DONTWAIT)
                except ConnectionError:
                    return  # the launcher is gone, and this process goes with it
            never.wait(INTERVAL_S)

    def _message(self, **more: object) -> bytes:
        return json.dumps({"name": self._name, "pid": os.getpid(), **more}).encode()
