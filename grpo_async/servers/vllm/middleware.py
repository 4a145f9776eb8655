"""ASGI middleware in front of vLLM's own app (`--middleware`): asks for the token, serves `inference.surface`, passes on
the rest. What vLLM's own routes generate is held while the server is paused, too, and salted by policy version."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from pydantic import ValidationError

from grpo_async.inference.guard import App, Receive, Scope, Send, TokenGuard
from grpo_async.inference.surface import GENERATE_PATH, INFO_PATH, PARAMETERS_PATH, SCORE_PATH, ServerInfo
from grpo_async.servers.vllm import compat, patches
from grpo_async.servers.vllm.answers import (
    DisconnectedError,
    RefusedError,
    read_body,
    send_error,
    send_json,
    status_and_message,
    unless_disconnected,
)
from grpo_async.servers.vllm.control import Control, Updates
from grpo_async.servers.vllm.generation import Generation, warm_up
from grpo_async.servers.vllm.load import EngineLoad, is_idle, max_running_requests, watch_load
from grpo_async.servers.vllm.state import GateBrokenError, ServerState

logger = logging.getLogger("vllm.grpo_async")


class RolloutMiddleware:
    """One per API server process; vLLM constructs it with its app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._guarded = TokenGuard(self._dispatch)
        self._state = ServerState()
        self._updates = Updates()
        self._generation = Generation(self._state)
        self._control = Control(self._state, self._updates)
        self._paths = {
            *(GENERATE_PATH, SCORE_PATH, INFO_PATH, PARAMETERS_PATH),
            *(path for _, path in self._control.routes),
        }
        self._engine: Any = None
        self._load = EngineLoad()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._start(scope, receive, send)
        engine = self._connected(scope["app"].state.engine_client)
        if scope["type"] != "http" or scope["path"] not in self._paths:
            return await self._pass_on(scope, receive, send)
        route = scope["method"], scope["path"]
        if route == ("POST", GENERATE_PATH):
            return await self._generation.generate(engine, receive, send)
        if route == ("POST", SCORE_PATH):
            return await self._generation.score(engine, receive, send)
        try:
            if route == ("GET", INFO_PATH):
                answer = self._info(engine).model_dump()
            elif route == ("GET", PARAMETERS_PATH):
                answer = (await unless_disconnected(self._updates.parameters(engine), receive)).model_dump()
            elif handler := self._control.routes.get(route):
                query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
                work = handler(engine, query, await read_body(receive))
                # A probe ends with its client, so that those of a hung engine do not pile up. What changes something goes on
                # to its end: half of it would leave the server in a state that nobody knows.
                answer = await (unless_disconnected(work, receive) if route[0] == "GET" else work)
            else:
                raise RefusedError(405, f"{route[1]} does not take {route[0]}")
        except DisconnectedError:
            return None  # nobody reads
        except (RefusedError, ValidationError) as error:
            return await send_error(send, *status_and_message(error))
        except Exception as error:
            # whatever the engine raised: the caller gets its words, the traceback is in the log
            logger.exception("%s %s failed", *route)
            return await send_error(send, 503 if engine.errored else 500, f"{type(error).__name__}: {error}")
        return await send_json(send, 200, answer)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server listens when this has said that the start is complete."""
        try:
            await warm_up(self._connected(scope["app"].state.engine_client))
        except Exception as error:
            logger.exception("the first requests failed: ending this server")
            await receive()  # waits: lifespan.startup, which is there
            return await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
        return await self._app(scope, receive, send)

    def _connected(self, engine: Any) -> Any:
        """The engine client, which is there from the first request on."""
        if self._engine is None:
            self._engine = engine
            self._load = watch_load(engine)
            patches.salt_requests(engine, lambda: self._state.salt)
            patches.on_engine_death(engine, lambda: self._state.gate.break_down("it ended; see the server's log"))
        return engine

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" or scope["method"] == "POST":  # it may generate
            with suppress(GateBrokenError):  # vLLM's own app says it in its own way
                await self._state.gate.wait()
        await self._app(scope, receive, send)

    def _info(self, engine: Any) -> ServerInfo:
        state = self._state
        changing = {
            "instance_id": state.instance_id,
            "policy_version": state.version,
            "active_requests": state.active_requests,
            **self._load.describe(is_idle=is_idle(engine, active_requests=state.active_requests)),
            "max_running_requests": max_running_requests(engine),
            "generated_tokens": state.generated_tokens,
            "busy_s": state.busy_s,
        }
        return compat.describe(engine).model_copy(update=changing)
