"""Guards a server's HTTP: `TokenGuard` requires the run's bearer token."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from grpo_async.inference.token import TOKEN_VARIABLE, has_bearer, token_from_environment

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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
        is_health = (scope["type"], scope.get("method"), scope["path"]) == ("http", "GET", "/health")
        if is_health or has_bearer(scope["headers"], self._token):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_BODY)).encode()),
            (b"www-authenticate", b"Bearer"),
            (b"connection", b"close"),  # nobody without the token holds a connection
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        return await send({"type": "http.response.body", "body": _BODY})
