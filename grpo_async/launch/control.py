"""The channel between the launcher and trainer rank 0: a unix socket in a private folder, one JSON object per line.

    trainer -> launcher   {"kind": "phase" | "step" | "evaluation" | "summary" | "failed", ...}
    launcher -> trainer   {"kind": "stop", "reason": "SIGINT"}

Trainer end (`ControlClient`): two daemon threads, no torch; sending never blocks the training loop and never raises
because the launcher is gone: that only sets `stop_requested`. Launcher end (`ControlServer`): asyncio; a stop that is
asked for before the trainer has connected is delivered when it does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

CONTROL_VARIABLE = "GRPO_ASYNC_CONTROL"
LAUNCHER_GONE = "the launcher is gone"

_CLOSE_TIMEOUT_S = 5.0  # for the last messages (summary, failed) to leave the process
_CONNECT_TIMEOUT_S = 5.0
_PROBE = b"\n"  # of the launcher to itself, see `drain`
_LINE_LIMIT = 64 * 2**20  # bytes; asyncio's default of 64 KiB is less than a long traceback


class ControlClient:
    """Trainer end. Without a launcher (`path` None) it is a null object: messages are dropped, stop is never requested.

    Attributes:
        stop_requested: set when the launcher asks to stop or is gone.
        stop_reason: name of the signal the launcher got, or that it is gone; None until then.
    """

    def __init__(self, path: Path | None) -> None:
        self.stop_requested = threading.Event()
        self.stop_reason: str | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._socket = self._connect(path) if path is not None else None
        self._writer: threading.Thread | None = None
        if self._socket is not None:
            threading.Thread(target=self._read, args=(self._socket,), name="control-read", daemon=True).start()
            self._writer = threading.Thread(target=self._write, args=(self._socket,), name="control-write", daemon=True)
            self._writer.start()
            atexit.register(self.close)  # daemon threads die with the interpreter; the summary must not

    @classmethod
    def from_environment(cls) -> Self:
        """A client of $GRPO_ASYNC_CONTROL; a null object when the variable is unset (trainer started by hand)."""
        path = os.environ.get(CONTROL_VARIABLE)
        return cls(Path(path) if path else None)

    def send(self, kind: str, **payload: Any) -> None:
        """Queue one message; returns at once. Any thread may call it.

        Raises:
            TypeError: `payload` is not JSON.
        """
        line = json.dumps({"kind": kind, **payload}).encode() + b"\n"
        with self._lock:
            if self._socket is not None and not self._closed:
                self._outbox.put(line)

    def close(self) -> None:
        """Deliver what is queued (a few seconds at most) and hang up. May be called more than once."""
        with self._lock:
            if self._socket is None or self._closed:
                return
            self._closed = True
            self._outbox.put(None)
        assert self._writer is not None
        self._writer.join(_CLOSE_TIMEOUT_S)
        self._socket.close()
        atexit.unregister(self.close)

    def _connect(self, path: Path) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            self._request_stop(LAUNCHER_GONE)
            return None
        connection.settimeout(None)
        return connection

    def _request_stop(self, reason: str) -> None:
        if not self.stop_requested.is_set():  # the first reason is the one that counts
            self.stop_reason = reason
            self.stop_requested.set()

    def _read(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if message.get("kind") == "stop":
                        self._request_stop(str(message.get("reason", "stop")))
        except (OSError, ValueError):
            pass  # a broken line or connection means the same as its end
        if not self._closed:
            self._request_stop(LAUNCHER_GONE)

    def _write(self, connection: socket.socket) -> None:
        while (line := self._outbox.get()) is not None:
            try:
                connection.sendall(line)
            except OSError:
                self._request_stop(LAUNCHER_GONE)
                return
        try:
            connection.shutdown(socket.SHUT_RDWR)  # ends the reading thread too; closing the descriptor alone would not
        except OSError:
            return  # the launcher hung up first


class ControlServer:
    """Launcher end. `on_message` is called in the event loop for every message of the trainer, in order.

    Use as an async context manager. `on_broken_line` gets a sentence about each line that is no message.
    """

    def __init__(
        self, path: Path, on_message: Callable[[Mapping[str, Any]], None], on_broken_line: Callable[[str], None]
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._on_broken_line = on_broken_line
        self._writers: set[asyncio.StreamWriter] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self._stop_line: bytes | None = None
        self._probed = asyncio.Event()
        self.has_connected = False
        """Whether a trainer has ever connected."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, path=self._path, limit=_LINE_LIMIT)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def request_stop(self, reason: str) -> None:
        """Ask the trainer, now or when it connects, to finish its step, checkpoint and end."""
        self._stop_line = json.dumps({"kind": "stop", "reason": reason}).encode() + b"\n"
        for writer in self._writers:
            writer.write(self._stop_line)

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything that ended clients have sent was handled, `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                # connections are accepted in order: when this one is heard, every earlier one has its reader
                _, writer = await asyncio.open_unix_connection(self._path)
                writer.write(_PROBE)
                await self._probed.wait()
                writer.close()
                while self._readers:
                    await asyncio.wait(self._readers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.has_connected = True
        self._readers.add(task)
        self._writers.add(writer)
        if self._stop_line is not None:
            writer.write(self._stop_line)
        try:
            while line := await reader.readline():
                self._handle(line)
        except (ConnectionError, ValueError) as error:  # ValueError: a line over the limit
            self._on_broken_line(f"the control channel broke: {error}")
        finally:
            self._writers.discard(writer)
            self._readers.discard(task)
            writer.close()

    def _handle(self, line: bytes) -> None:
        if line == _PROBE:
            self._probed.set()
            return
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            self._on_message(message)
        else:
            self._on_broken_line(f"the trainer sent a line that is no message: {line[:200]!r}")
