"""A real HTTP server on loopback that plays an inference server by a script: as slow, silent or broken as a test wants.

It runs on an event loop in a thread of its own. Every request is noted before it is answered; `wait_for` lets a test wait
until the server has seen something.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 30.0  # the machine may be busy; a test fails at the end of it, it does not wait for it

Request = dict[str, Any]
Script = Callable[[Request], AsyncIterator[bytes]]
"""From the body of a request to the lines of its answer, one by one; may raise Refusal before the first."""


class Refusal(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, words: str = "") -> None:
        self.status = status
        self.words = words
        super().__init__(f"{status}: {words}")


def line(ids: Sequence[int], *, version: int = 0, finish: str | None = "stop") -> bytes:
    """A GenerateChunk of the HTTP surface; every token has the logprob -0.5."""
    chunk = {"token_ids": list(ids), "logprobs": [-0.5] * len(ids), "policy_version": version, "finish_reason": finish}
    return json.dumps(chunk).encode() + b"\n"


@dataclass(kw_only=True)
class LocalServer:
    """What the server has seen. `most_connections`: open at one moment."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    num_connections: int = 0
    most_connections: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def wait_for(self, seen: Callable[[], bool], what: str) -> None:
        """Until `seen` is true; it is asked again after every request and every closed connection."""
        with self.changed:
            assert self.changed.wait_for(seen, LIMIT_S), f"waited {LIMIT_S:.0f} s for {what}"

    def let_go(self, event: asyncio.Event) -> None:
        """Set an event that answers wait for."""
        self.loop.call_soon_threadsafe(event.set)


@contextmanager
def local_server(script: Script) -> Iterator[LocalServer]:
    """Serve until the end of the `with` block; what is still being answered then is broken off."""
    state = LocalServer()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with state.changed:
            state.num_connections += 1
            state.most_connections = max(state.most_connections, state.num_connections)
        try:
            while True:
                request = json.loads(await _read_body(reader) or b"{}")
                with state.changed:
                    state.requests.append(request)
                    state.changed.notify_all()
                await _answer(writer, script(request))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client hung up
        finally:
            writer.transport.abort()
            with state.changed:
                state.num_connections -= 1
                state.changed.notify_all()

    started = threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=1024)
        state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        try:
            await server.serve_forever()
        except asyncio.CancelledError:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # one turn of the loop, in which the aborted connections close their sockets

    def run() -> None:
        asyncio.set_event_loop(state.loop)
        state.loop.run_until_complete(serving)
        state.loop.close()

    serving = state.loop.create_task(serve())
    thread = threading.Thread(target=run, name="local-server", daemon=True)
    thread.start()
    assert started.wait(LIMIT_S), "the server did not start"
    try:
        yield state
    finally:
        state.loop.call_soon_threadsafe(serving.cancel)
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the server did not end"


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    """The body of the next request, empty for a GET."""
    head = await reader.readuntil(b"\r\n\r\n")  # raises IncompleteReadError at the end of the connection
    lengths = [part.partition(b":")[2] for part in head.split(b"\r\n") if part.lower().startswith(b"content-length:")]
    return await reader.readexactly(int(lengths[0])) if lengths else b""


async def _answer(writer: asyncio.StreamWriter, lines: AsyncIterator[bytes]) -> None:
    try:
        first = await anext(lines)
    except Refusal as refusal:
        words = json.dumps({"error": refusal.words}).encode()
        writer.write(b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n\r\n" % (refusal.status, len(words)) + words)
        await writer.drain()
        return
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    _write_chunk(writer, first)
    await writer.drain()
    async for part in lines:
        _write_chunk(writer, part)
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _write_chunk(writer: asyncio.StreamWriter, part: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
