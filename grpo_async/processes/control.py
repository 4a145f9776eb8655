"""The channel between the launcher and the processes of the trainer: a unix socket in a private folder, one JSON object per line.

    trainer -> launcher   {"kind": "alive", "name": "trainer rank 0", "pid": 7}           every process: each second
                          {"kind": "end", "end": {...}}                                   how a rank ended (heartbeat.RankEnd)
                          {"kind": "stalled", "text": "..."}                              no progress; rank 0, as all that follow
                          {"kind": "phase" | "preflight" | "step" | "example" | "evaluation" | "summary", ...}
                          {"kind": "servers", "servers": [{"index": 0, "state": "serving", ...}]}   see trainer.connections
                          {"kind": "note" | "warning", "text": "..."}
                          {"kind": "server_serving", "index": 0, "num_restarts": 1}
                          {"kind": "restart_server", "index": 0, "reason": "it hangs", "num_restarts": 1}
                          {"kind": "bye"}                                                 the last; the launcher hangs up
    launcher -> trainer   {"kind": "stop"}
                          {"kind": "server_event", "index": 0, "event": "exited", "detail": "...", "num_restarts": 1}

`event` is an inference.fleet.ServerEvent. `num_restarts` is how often the server was restarted, as far as the sender knows.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

logger = logging.getLogger(__name__)

BYE = "bye"
_CLOSE_TIMEOUT_S = 60.0
"""For the last messages (the summary) to leave the process: a launcher on a busy machine is behind."""
_HANG_UP_TIMEOUT_S = 10.0
"""For the launcher to have read them."""
_CONNECT_TIMEOUT_S = 5.0
_ABOUT_A_SERVER = ("server_serving", "restart_server")
_LINE_LIMIT = 64 * 2**20  # bytes; asyncio's default of 64 KiB is less than a long traceback
_BARRIER = "barrier"


def encode(kind: str, content: Mapping[str, Any]) -> bytes:
    """A message as one line. Raises TypeError: `content` is not JSON."""
    return json.dumps({"kind": kind, **content}).encode() + b"\n"


class ControlClient:
    """Trainer end, with daemon threads. Sending never blocks the training loop, and never raises because the launcher is gone: that
    only sets `stop_requested`. Without a launcher (`path` None) messages are dropped, and stop is never requested.

    Attributes:
        stop_requested: set when the launcher asks to stop or is gone.
    """

    def __init__(self, path: Path | None) -> None:
        self.stop_requested = threading.Event()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._server_events: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._num_restarts: dict[int, int] = {}  # of each server, as far as the listener knows
        self._socket = self._connect(path) if path is not None else None
        self._writer: threading.Thread | None = None
        if self._socket is not None:
            self._reader = threading.Thread(target=self._read, args=(self._socket,), name="control-read", daemon=True)
            self._reader.start()
            self._writer = threading.Thread(target=self._write, args=(self._socket,), name="control-write", daemon=True)
            self._writer.start()
            atexit.register(self.close)  # daemon threads die with the interpreter; the summary must not

    def listen(self, listener: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `listener` with each `server_event`, in order, those that came before included."""
        threading.Thread(target=self._deliver, args=(listener,), name="server-events", daemon=True).start()

    def send(self, kind: str, **payload: Any) -> None:
        """Queue one message; returns at once. Any thread may call it. Raises TypeError: `payload` is not JSON."""
        if kind in _ABOUT_A_SERVER:
            payload["num_restarts"] = self._num_restarts.get(payload["index"], 0)
        line = encode(kind, payload)
        with self._lock:
            if self._socket is not None and not self._closed:
                self._outbox.put(line)

    def close(self) -> None:
        """Deliver what is queued (a minute at most) and hang up, once the launcher has read it: a process that ends with unread
        messages of the launcher would take its own last ones with it. May be called more than once."""
        with self._lock:
            if self._socket is None or self._closed:
                return
            self._closed = True
            self._outbox.put(encode(BYE, {}))
            self._outbox.put(None)
        assert self._writer is not None
        self._writer.join(_CLOSE_TIMEOUT_S)
        self._reader.join(_HANG_UP_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the launcher hung up first
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the reading thread, if it did not
        self._socket.close()
        atexit.unregister(self.close)

    def _connect(self, path: Path) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(path))  # within _CONNECT_TIMEOUT_S, set above
        except OSError:
            connection.close()
            self.stop_requested.set()
            return None
        connection.settimeout(None)
        return connection

    def _read(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:  # until the connection ends; a daemon thread
                    message = json.loads(line)
                    if message["kind"] == "stop":
                        self.stop_requested.set()
                    elif message["kind"] == "server_event":
                        self._server_events.put(message)
        except (OSError, ValueError):
            pass  # a broken line or connection means the same as its end
        if not self._closed:
            self.stop_requested.set()

    def _deliver(self, listener: Callable[[Mapping[str, Any]], None]) -> None:
        while True:  # a daemon thread
            message = self._server_events.get()
            self._num_restarts[int(message["index"])] = int(message.get("num_restarts", 0))
            try:
                listener(message)
            except Exception:  # others follow
                logger.exception("a server event could not be handled: %s", dict(message))

    def _write(self, connection: socket.socket) -> None:
        while (line := self._outbox.get()) is not None:  # `close` ends it; a daemon thread
            try:
                connection.sendall(line)  # in a daemon thread, for which `close` has a deadline
            except OSError:
                self.stop_requested.set()
                return


class ControlServer:
    """Launcher's end, an async context manager. `on_message` is called in the event loop for every message of the trainer's
    processes, those of each in order; `on_broken` gets a sentence when the channel breaks."""

    def __init__(
        self, path: Path, on_message: Callable[[Mapping[str, Any]], None], on_broken: Callable[[str], None]
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._on_broken = on_broken
        self._readers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._all_accepted = asyncio.Event()
        self._lines: list[bytes] = []  # all that was sent, for a trainer that connects later

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self._path, limit=_LINE_LIMIT)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for reader, writer in self._readers.items():
            reader.cancel()
            writer.transport.abort()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def send(self, kind: str, **content: Any) -> None:
        """Tell the trainer, now or when it connects; see the module. "stop": finish the step, save a checkpoint and end."""
        line = encode(kind, content)
        self._lines.append(line)
        for writer in self._readers.values():
            writer.write(line)

    async def read_the_rest(self, timeout_s: float) -> None:
        """Wait until everything that ended clients have sent was handled, `timeout_s` at most. A connection of our own comes after
        those that have not even been accepted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                _, own = await asyncio.open_unix_connection(self._path)
                own.write(encode(_BARRIER, {}))
                await self._all_accepted.wait()
                own.close()
                while self._readers:
                    await asyncio.wait(self._readers)  # timeout_s at most

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.writelines(self._lines)
        task = asyncio.create_task(self._read(reader, writer))
        self._readers[task] = writer
        task.add_done_callback(self._readers.pop)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():  # until the trainer hangs up, or cancelled with the run
                message = json.loads(line)
                if message["kind"] == BYE:
                    break
                if message["kind"] == _BARRIER:
                    self._all_accepted.set()
                else:
                    self._on_message(message)
        # half a line, one over the limit, or an unknown one
        except (ConnectionError, LookupError, TypeError, ValueError) as error:
            self._on_broken(f"the control channel broke: {error!r}")  # without a word the trainer would stop
        finally:
            writer.transport.abort()
