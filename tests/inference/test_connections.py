"""The connections to a server, against one that sends exactly these bytes."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

import pytest

from grpo_async.inference import connections as connections_module
from grpo_async.inference.connections import BrokenConnectionError, Connections

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _ask(
    pieces: Sequence[bytes], *, times: int = 1, keeps_open: bool = True, timeout_s: float = 20.0
) -> tuple[list[list[bytes]], list[bytes]]:
    """Lines of each answer, and the heads of the requests, one for each connection that was made."""
    heads: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(heads)
        heads.append(b"")
        try:
            while True:
                heads[number] += await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)  # the body, {}
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)  # so that it arrives by itself
                if not keeps_open:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connections = Connections(
        url, token="secret", request_timeout_s=timeout_s, certificates=ssl.create_default_context()
    )
    found = []
    try:
        for _ in range(times):
            async with connections.post(b"{}") as answer:
                found.append([line async for line in answer.lines()])
    finally:
        await connections.aclose()
        server.close()
    return found, heads


def test_lines_are_whole_however_the_bytes_arrive_and_the_connection_is_used_again() -> None:
    pieces = [HEAD, _chunk(b'{"a"'), _chunk(b': 1}\n{"b": 2}\n\n{"c'), _chunk(b'": 3}\n'), b"0\r\n\r\n"]
    found, heads = asyncio.run(_ask(pieces, times=3))
    assert found == [[b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']] * 3
    assert len(heads) == 1  # one connection for the three, one after the other
    assert heads[0].lower().count(b"authorization: bearer secret") == 3
    assert b"accept-encoding" not in heads[0].lower()


def test_silence_has_a_deadline_and_says_so() -> None:
    with pytest.raises(BrokenConnectionError, match=r"http://127\.0\.0\.1:\d+/rollout/generate was silent for 0\.5 s"):
        asyncio.run(_ask([HEAD, _chunk(b"{}\n")], timeout_s=0.5))


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(BrokenConnectionError, match="ClientPayloadError"):
        asyncio.run(_ask([HEAD, _chunk(b"{}\n")], keeps_open=False))


def test_a_redirect_is_not_followed_since_it_would_take_the_token_along() -> None:
    found, heads = asyncio.run(_ask([b"HTTP/1.1 307 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"]))
    assert found == [[]]
    assert b"elsewhere" not in heads[0]
    assert heads[0].count(b"POST ") == 1


def test_a_server_that_does_not_take_a_long_request_has_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_LONGEST_CONNECT_S", 0.2)

    async def ask() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts; nobody reads
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            connections = Connections(url, token=None, request_timeout_s=0.3, certificates=ssl.create_default_context())
            try:
                async with connections.post(b"x" * 50_000_000):
                    raise AssertionError("an answer")
            finally:
                await connections.aclose()

    with pytest.raises(BrokenConnectionError, match=r"did not take the request within 0\.5 s"):
        asyncio.run(ask())
