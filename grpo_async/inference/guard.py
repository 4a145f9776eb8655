"""Guards a server's HTTP: asks for the run's bearer token. A request without it ends its connection."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from grpo_async.inference.token import token_from_environment

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_BODY = json.dumps({"error": "missing or wrong bearer token; the server's token is in $GRPO_ASYNC_TOKEN"}).encode()


class TokenGuard:
    """ASGI middleware: every path but GET /health without the token is refused with 401, a WebSocket is not accepted. (vLLM's own
    --api-key guards /v1 only.)

    Without $GRPO_ASYNC_TOKEN it lets everything through; servers allow that on loopback only.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        token = token_from_environment()
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._expected is None:
            return await self._app(scope, receive, send)
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # exactly one: of several, a proxy before us may have looked at another than we would
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            return await self._app(scope, receive, send)
        if self._is_open(scope):
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

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        return (scope["type"], scope.get("method"), scope["path"]) == ("http", "GET", "/health")


def _closing(send: Send) -> Send:
    """The server ends the connection after the answer."""

    async def send_and_close(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_and_close
