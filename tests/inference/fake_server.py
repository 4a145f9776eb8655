"""A real HTTP server on loopback with the surface of an inference server, for faults that no real one makes on demand.

It keeps its port while it is stopped and started again. What it answers is set by its attributes, at any time.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.local_server import LIMIT_S, Refusal, Request, Script, line


async def two_tokens(request: Request) -> AsyncIterator[bytes]:
    """The default answer to a generation request."""
    yield line([7, 8])


@dataclass(kw_only=True, eq=False)
class FakeServer:
    """`hangs`: paths that are never answered; `refuses`: path -> status."""

    instance_id: str = "first"
    generated_tokens: int = 0
    busy_s: float = 0.0
    hangs: set[str] = field(default_factory=set)
    refuses: dict[str, int] = field(default_factory=dict)
    script: Script = two_tokens
    answers: dict[str, Any] = field(default_factory=dict)
    """path -> JSON; for paths that are not served anyway."""
    seen: list[tuple[str, str, Request]] = field(default_factory=list)
    """(method, path with query, body)"""
    certificate: ssl.SSLContext | None = None
    port: int = 0
    num_connections: int = 0

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-server", daemon=True)
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
        self._loop.close()

    def break_connections(self) -> None:
        """Reset what is open; new connections are taken."""
        self._run(self._abort)

    def wait_for(self, seen: Callable[[], bool], what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(seen, LIMIT_S), f"waited {LIMIT_S:.0f} s for {what}"

    def asked(self, path: str) -> list[Request]:
        """Bodies of the requests to a path."""
        return [body for _, target, body in self.seen if target.partition("?")[0] == path]

    def _run(self, work: Callable[[], Any]) -> None:
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
        try:
            while True:
                method, target, body = await _read_request(reader)
                with self.changed:
                    self.seen.append((method, target, body))
                    self.changed.notify_all()
                path = target.partition("?")[0]
                if path in self.hangs:
                    await reader.readexactly(1)  # raises when the client hangs up, which is all that ends it
                await self._answer_until_gone(reader, self._answer(writer, path, body))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client hung up, or this server breaks the connection
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._count(-1)

    @staticmethod
    async def _answer_until_gone(reader: asyncio.StreamReader, answer: Coroutine[Any, Any, None]) -> None:
        """Answer, or notice that the client hung up."""
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

    def _count(self, change: int) -> None:
        with self.changed:
            self.num_connections += change
            self.changed.notify_all()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: Request) -> None:
        if path in self.refuses:
            return await _send(writer, self.refuses[path], {"error": "told to refuse"})
        if path != "/rollout/generate":
            return await _send(writer, 200, self._state(path))
        if body["instance_id"] not in ("", self.instance_id):
            return await _send(writer, 503, {"error": f"this is instance {self.instance_id}"})
        await self._stream(writer, self.script(body))
        return None

    def _state(self, path: str) -> Any:
        if path == "/is_paused":
            return {"is_paused": False}
        if path != "/rollout/info":
            return self.answers.get(path, {})
        return {
            "engine": "embedded", "engine_version": "fake", "instance_id": self.instance_id, "model": "fake",
            "dtype": "float32", "max_model_len": 1024, "policy_version": 0, "num_workers": 2,
            "generated_tokens": self.generated_tokens, "busy_s": self.busy_s,
        }  # fmt: skip

    @staticmethod
    async def _stream(writer: asyncio.StreamWriter, lines: AsyncIterator[bytes]) -> None:
        begun = False
        try:
            async for part in lines:
                if not begun:
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    begun = True
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
        except Refusal as refusal:
            return await _send(writer, refusal.status, {"error": refusal.words})
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, Request]:
    head = await reader.readuntil(b"\r\n\r\n")
    method, target, _ = head.split(b" ", 2)
    lengths = [part.partition(b":")[2] for part in head.split(b"\r\n") if part.lower().startswith(b"content-length:")]
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    return method.decode(), target.decode(), json.loads(body or b"{}")


async def _send(writer: asyncio.StreamWriter, status: int, answer: Any) -> None:
    words = json.dumps(answer).encode()
    writer.write(b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n\r\n" % (status, len(words)) + words)
    await writer.drain()


@contextmanager
def fake_server(**fields: Any) -> Iterator[FakeServer]:
    """A server that listens, until the end of the `with` block."""
    server = FakeServer(**fields)
    server.start()
    try:
        yield server
    finally:
        server.close()
