"""The token guard in front of any ASGI app: what it lets through, what it refuses, how it compares. Silent connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from grpo_async.inference import guard
from grpo_async.inference.guard import GuardedProtocol, TokenGuard
from grpo_async.inference.token import TOKEN_VARIABLE

Headers = list[tuple[bytes, bytes]]
RIGHT = (b"authorization", b"Bearer secret")


def _ask(scope: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the app behind the guard was reached, and what the guard itself sent."""
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def receive() -> dict[str, Any]:
        raise AssertionError("the guard read a body")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(TokenGuard(app)(scope, receive, send))
    return bool(reached), sent


def _http(method: str = "POST", path: str = "/pause", headers: Headers | None = None) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": headers or []}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")


def test_the_right_token_and_get_health_pass() -> None:
    assert _ask(_http(headers=[(b"host", b"a"), RIGHT, (b"accept", b"*/*")])) == (True, [])
    assert _ask(_http("GET", "/health")) == (True, [])


def test_anything_else_is_refused_with_401_before_its_body_is_read() -> None:
    values = [b"", b"Bearer ", b"Bearer secre", b"Bearer secretx", b"Basic secret", b"secret"]
    cases: list[Headers] = [[], [(b"x-authorization", b"Bearer secret")], [RIGHT, RIGHT]]
    cases += [[(b"authorization", value)] for value in values]
    for headers in cases:
        reached, sent = _ask(_http(headers=headers))
        assert not reached, headers
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert sent[0]["status"] == 401
        assert {(b"www-authenticate", b"Bearer"), (b"connection", b"close")} <= set(sent[0]["headers"])
        assert b"secret" not in sent[1]["body"]


def test_only_get_health_is_open() -> None:
    for method, path in [
        *(("POST", "/health"), ("HEAD", "/health"), ("OPTIONS", "/health"), ("GET", "")),
        *(("GET", path) for path in ("/health/", "//health", "/./health", "/healthx", "/health/../pause", "/Health")),
    ]:
        reached, sent = _ask(_http(method, path))
        assert (reached, sent[0]["status"]) == (False, 401), (method, path)


def test_a_websocket_needs_the_token_too_even_for_health() -> None:
    scope = {"type": "websocket", "path": "/health", "headers": []}
    assert _ask(scope) == (False, [{"type": "websocket.close", "code": 1008}])
    assert _ask({**scope, "headers": [RIGHT]}) == (True, [])


def test_only_a_connection_without_the_headers_of_a_request_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_HEADERS_TIMEOUT_S", 1.0)

    async def run() -> None:
        all_are_closed = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await all_are_closed.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        config = uvicorn.Config(app, http=GuardedProtocol, lifespan="off")
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: GuardedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        address = server.sockets[0].getsockname()
        connections = []
        for words in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"", b"GET / HTTP/1.1\r\nHost: "):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(words)
            connections.append((reader, writer))
        async with asyncio.timeout(30.0):
            for reader, _ in connections[1:]:
                assert await reader.read() == b""
            all_are_closed.set()
            assert (await connections[0][0].readline()).startswith(b"HTTP/1.1 200")
        for _, writer in connections:
            writer.close()
        server.close()

    asyncio.run(run())
