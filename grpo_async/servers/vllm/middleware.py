"""ASGI middleware in front of vLLM's own app (`--middleware`): requires the token, serves `inference.api`, and passes on
the rest. Our routes replace vLLM's routes of the same name: a policy version must change at an exact point of the token stream.
Requests to vLLM's own generating routes are also held while the server is paused, and salted like ours."""

from __future__ import annotations

import logging
from contextlib import suppress

from starlette.routing import Route

from grpo_async.errors import message_of
from grpo_async.inference.guard import App, Receive, Scope, Send, TokenGuard
from grpo_async.servers.app import RolloutApp
from grpo_async.servers.requests import EngineDeadError
from grpo_async.servers.vllm.engine import VllmEngine

logger = logging.getLogger("vllm.grpo_async")


class RolloutMiddleware:
    """The middleware; one per API server process. vLLM constructs it with its app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._guarded = TokenGuard(self._dispatch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._start(scope, receive, send)
        if scope["type"] == "http" and scope["path"] in self._paths:
            return await self._ours(scope, receive, send)
        if scope["type"] == "websocket" or scope["method"] == "POST":  # it may generate
            with suppress(EngineDeadError):  # vLLM's own app reports it in its own way
                await self._engine.requests.gate.wait()
        return await self._app(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Warm up at the ASGI startup event: the server listens only afterward. vLLM's engine client exists by then."""
        self._engine = VllmEngine(scope["app"].state.engine_client)
        try:
            await self._engine.warm_up()
        except Exception as error:
            logger.exception("the first requests failed: stopping this server")
            await receive()  # returns at once with lifespan.startup
            return await send({"type": "lifespan.startup.failed", "message": message_of(error)})
        self._ours = RolloutApp(self._engine).app
        self._paths = {route.path for route in self._ours.routes if isinstance(route, Route)}
        return await self._app(scope, receive, send)
