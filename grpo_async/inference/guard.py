"""Guards a server's HTTP: `TokenGuard` requires the run's bearer token, `GuardedProtocol` limits connections that send nothing.

A request without the token closes its connection, so nobody without it holds one longer than it takes to send headers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from grpo_async.inference.token import TOKEN_VARIABLE, has_bearer, token_from_environment

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_HEADERS_TIMEOUT_S = 10.0
_BODY = json.dumps({"error": f"missing or wrong bearer token; the server's token is in ${TOKEN_VARIABLE}"}).encode()


class TokenGuard:
    """ASGI middleware that refuses requests without the token with 401 on every path except GET /health; it does not accept such
    WebSockets. (vLLM's own --api-key guards /v1 only.)

    Without $GRPO_ASYNC_TOKEN it lets everything through; servers allow that only on loopback.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = token_from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._token is None:
            return await self._app(scope, receive, send)
        if has_bearer(scope["headers"], self._token):
            return await self._app(scope, receive, send)
        if (scope["type"], scope.get("method"), scope["path"]) == ("http", "GET", "/health"):
            return await self._app(scope, receive, _closing(send))
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_BODY)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        send = _closing(send)
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        return await send({"type": "http.response.body", "body": _BODY})


def _closing(send: Send) -> Send:
    """Make the server close the connection after the answer."""

    async def send_and_close(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_and_close


_Base: Any = AutoHTTPProtocol  # h11 or httptools, whichever is installed


class GuardedProtocol(_Base):  # type: ignore[misc]
    """The protocol class for `uvicorn.Config(http=...)`. The headers of a connection's first request have 10 s to arrive."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle = self.loop.call_later(_HEADERS_TIMEOUT_S, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # the headers have arrived: those of a request, or of a WebSocket, whose protocol has taken the connection over
        if self.cycle is not None or self not in self.connections:
            self._deadline.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)
