"""A real HTTP server on loopback that plays an inference server: as slow, silent or broken as a test wants.

It runs on an event loop in a thread of its own, and keeps its port while it is stopped and started again. Every request is noted
before it is answered; `wait_for` lets a test wait until the server has seen something.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 30.0  # the machine may be busy; a test fails at the end of it, it does not wait for it

Request = dict[str, Any]
Script = Callable[[Request], AsyncIterator[bytes]]
"""From the body of a generation request to the parts of its answer, one by one; may raise Refusal before the first, and
BreakOff."""


class Refusal(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str = "") -> None:
        self.status = status
        self.message = message
        super().__init__(f"{status}: {message}")


class BreakOff(Exception):
    """The connection is reset in the middle of the answer."""


def line(ids: Sequence[int], *, version: int = 0, finish: str | None = "stop", **more: Any) -> bytes:
    """A GenerateChunk of the HTTP API; every token has the logprob -0.5."""
    chunk = {"token_ids": list(ids), "logprobs": [-0.5] * len(ids), "policy_version": version, "finish_reason": finish}
    return json.dumps(chunk | more).encode() + b"\n"


async def two_tokens(request: Request) -> AsyncIterator[bytes]:
    yield line([7, 8])


@dataclass(kw_only=True, eq=False)
class LocalServer:
    """What the server answers is set by its attributes, at any time; `hangs`: paths that are never answered; `refuses`: path ->
    status. `most_connections`: open at one moment."""

    script: Script = two_tokens
    instance_id: str = "first"
    hangs: set[str] = field(default_factory=set)
    refuses: dict[str, int] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    """path -> JSON; for paths that are served anyway it replaces fields."""
    certificate: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    """Bodies of all requests."""
    seen: list[tuple[str, str, Request]] = field(default_factory=list)
    """(method, path with query, body)"""
    num_connections: int = 0
    most_connections: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-server", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; on the same port as before."""
        self._run(self._start)

    def stop(self) -> None:
        """Refuse connections from now on, and break those that are open; as a process does that is killed."""
        self._run(self._stop)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the server did not end"
        self._loop.close()

    def break_connections(self) -> None:
        """Reset what is open; new connections are taken."""
        self._run(self._abort)

    def wait_for(self, seen: Callable[[], bool], what: str) -> None:
        """Until `seen` is true; it is asked again after every request and every closed connection."""
        with self.changed:
            assert self.changed.wait_for(seen, LIMIT_S), f"waited {LIMIT_S:.0f} s for {what}"

    def let_go(self, event: asyncio.Event) -> None:
        """Set an event that answers wait for."""
        self._loop.call_soon_threadsafe(event.set)

    def asked(self, path: str) -> list[Request]:
        """Bodies of the requests to a path."""
        return [body for _, target, body in self.seen if target.partition("?")[0] == path]

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(work(), self._loop).result(LIMIT_S)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._talk, "127.0.0.1", self.port, ssl=self.certificate, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._abort()

    async def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # one turn of the loop, in which the connections close their sockets

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._count(1)
        first = b""
        try:
            while True:
                method, target, body = await _read_request(reader, first)
                with self.changed:
                    self.requests.append(body)
                    self.seen.append((method, target, body))
                    self.changed.notify_all()
                path = target.partition("?")[0]
                if path in self.hangs:
                    await reader.readexactly(1)  # raises when the client hangs up, which is all that ends it
                first = await self._answer_until_gone(reader, self._answer(writer, path, body))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError, BreakOff):
            pass  # the client hung up, or this server breaks the connection
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._count(-1)

    @staticmethod
    async def _answer_until_gone(reader: asyncio.StreamReader, answer: Coroutine[Any, Any, None]) -> bytes:
        """Answer, or notice that the client hung up. Returns what was read of the next request."""
        answering = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(reader.read(1))  # a client says nothing more before it has its answer
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ConnectionError("the client hung up")
            answering.result()
        finally:
            answering.cancel()
            gone.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)
        return b"" if gone.cancelled() or gone.exception() else gone.result()

    def _count(self, change: int) -> None:
        with self.changed:
            self.num_connections += change
            self.most_connections = max(self.most_connections, self.num_connections)
            self.changed.notify_all()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: Request) -> None:
        if path in self.refuses:
            await _send(writer, self.refuses[path], {"error": "told to refuse"})
        elif path != "/rollout/generate":
            await _send(writer, 200, self._state(path))
        elif body["instance_id"] not in ("", self.instance_id):
            await _send(writer, 503, {"error": f"this is instance {self.instance_id}"})
        else:
            await self._stream(writer, self.script(body))

    def _state(self, path: str) -> Any:
        if path in ("/is_paused", "/pause", "/resume"):
            return self.answers.get(path, {"is_paused": path == "/pause"})
        if path != "/rollout/info":
            return self.answers.get(path, {})
        return {
            "engine": "embedded", "instance_id": self.instance_id, "model": "fake",
            "dtype": "float32", "max_model_len": 1024, "policy_version": 0, "num_workers": 2,
            "generated_tokens": 0, "busy_s": 0.0, **self.answers.get(path, {}),
        }  # fmt: skip

    @staticmethod
    async def _stream(writer: asyncio.StreamWriter, parts: AsyncIterator[bytes]) -> None:
        is_started = False
        try:
            async for part in parts:
                if not is_started:
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    is_started = True
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
        except Refusal as refusal:
            await _send(writer, refusal.status, {"error": refusal.message})
            return
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _read_request(reader: asyncio.StreamReader, first: bytes) -> tuple[str, str, Request]:
    """Raises IncompleteReadError at the end of the connection."""
    head = first + await reader.readuntil(b"\r\n\r\n")
    method, target, _ = head.split(b" ", 2)
    lengths = [part.partition(b":")[2] for part in head.split(b"\r\n") if part.lower().startswith(b"content-length:")]
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    return method.decode(), target.decode(), json.loads(body or b"{}")


async def _send(writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
    body = json.dumps(answer).encode()
    writer.write(b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
    await writer.drain()


@contextmanager
def local_server(script: Script = two_tokens, **fields: Any) -> Iterator[LocalServer]:
    """Serve until the end of the `with` block; what is still being answered then is broken off."""
    server = LocalServer(script=script, **fields)
    server.start()
    try:
        yield server
    finally:
        server.close()
