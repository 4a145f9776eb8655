"""One worker process as its owner sees it: start, exchange bytes, kill.

It is a fresh interpreter with a socket to this process. (multiprocessing's spawn would import the trainer's main module,
and so torch, into every worker.) It has a process group of its own, so Ctrl-C does not reach it and killing it also kills
what the reward function started. It dies with the *thread* that made it (see `grpo_async.utils.lifetime`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Pipe

READY = b"ready"
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[4]).main(int(sys.argv[2]), sys.argv[3])"
)
_REAP_TIMEOUT_S = 10.0  # after SIGKILL; more means a process stuck in the kernel


class WorkerProcess:
    """A worker that serves the function `reference` (`module:attribute`); `module` holds its `main(descriptor, reference)`."""

    def __init__(self, reference: str, *, module: str = "grpo_async.rewards.worker") -> None:
        self._connection, theirs = Pipe()
        with theirs:
            command = [
                sys.executable,
                "-u",  # workers end by SIGKILL, and what a function has printed must not be lost with them
                "-c",
                _BOOT,
                json.dumps([str(entry) for entry in sys.path]),
                str(theirs.fileno()),
                reference,
                module,
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the function is imported. TimeoutError, or EOFError / OSError when the worker died."""
        self.receive(timeout_s)

    def exchange(self, request: bytes, timeout_s: float) -> bytes:
        """Send a request and wait for its answer. TimeoutError, or EOFError / OSError when the worker died."""
        self.send(request, timeout_s)
        return self.receive(timeout_s)

    def send(self, request: bytes, timeout_s: float) -> None:
        """Send one message. TimeoutError: the worker took nothing of it for so long, and must be killed; OSError: it died."""
        self._limit(socket.SO_SNDTIMEO, timeout_s)
        try:
            self._connection.send_bytes(request)  # SO_SNDTIMEO ends it
        except BlockingIOError as error:
            raise TimeoutError from error

    def receive(self, timeout_s: float) -> bytes:
        """Wait for the next message. TimeoutError, or EOFError / OSError when the worker died."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        self._limit(socket.SO_RCVTIMEO, timeout_s)  # the rest of a message whose beginning is there
        try:
            return self._connection.recv_bytes()  # SO_RCVTIMEO ends it
        except BlockingIOError as error:
            raise TimeoutError from error

    def _limit(self, direction: int, timeout_s: float) -> None:
        """Bound every single read or write of the socket; multiprocessing's connections have no time-outs."""
        seconds = max(1e-3, timeout_s)  # 0 would mean: no limit
        with socket.socket(fileno=os.dup(self._connection.fileno())) as handle:
            handle.setblocking(True)  # whatever socket.setdefaulttimeout says
            handle.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    def kill(self) -> int:
        """Kill the worker and its group and reap it; returns the exit code, negative for a signal. From any thread."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself since `poll`
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait(_REAP_TIMEOUT_S)

    def reap(self) -> int:
        """Wait for a worker that hung up, and close its socket; returns the exit code. Kills it if it does not end."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = self.kill()
        self.close()
        return code

    def close(self) -> None:
        """Close the socket; only when no thread uses it."""
        self._connection.close()
