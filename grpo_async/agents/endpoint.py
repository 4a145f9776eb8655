"""The HTTP server that agents call: one in each process with a rollout loop, on that loop.

    POST /v1/chat/completions   /v1/responses   /v1/messages   /v1/messages/count_tokens
    GET  /v1/models             lists one name; requests with any other name also get the policy

The paths also work without /v1. A rollout's keys are sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. A client that
disconnects cancels its call; a complete answer is recorded even if the client is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, Self

import orjson
from aiohttp import web

from grpo_async.agents.apis import ChatCompletion, Exchange, Messages, Responses
from grpo_async.agents.calls import ApiError, bad_request
from grpo_async.agents.history import HistoryRenderer
from grpo_async.agents.session import AgentSession, Sessions, unknown_key
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.errors import RunError
from grpo_async.inference.client import InferenceClient
from grpo_async.utils.network import host_in_url

logger = logging.getLogger(__name__)

_EXCHANGES: Mapping[str, type[Exchange]] = {
    "/chat/completions": ChatCompletion,
    "/responses": Responses,
    "/messages": Messages,
    "/messages/count_tokens": Messages,
}
_MAX_REQUEST_BYTES = 8 << 20  # to parse more would hold up all other rollouts
_BACKLOG = 4096  # all agents of a run may begin at once
_KEEPALIVE_S = 75.0
_END_TIMEOUT_S = 5.0
_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


class _Connection(web.RequestHandler):
    """A connection whose task may be cancelled between two requests, as all tasks of the rollout loop are before the last
    evaluation: it is then closed, while aiohttp would leave the client waiting for the answer to its next request."""

    __slots__ = ()

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            if self.transport is not None:
                self.transport.close()


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class AgentEndpoint:
    """See the module's docstring. An async context manager; `start` and `aclose` may be called instead, `start` repeatedly."""

    def __init__(
        self,
        client: InferenceClient,
        renderer: ChatRenderer,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.sessions = Sessions(client, HistoryRenderer(renderer), model)
        """The sessions of running rollouts: `AgentSession(endpoint.sessions, ...)` opens one, after `start`."""
        self._host, self._port = host, port
        self._starting = asyncio.Lock()
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start to listen.

        Raises:
            RunError: the address is not available.
        """
        async with self._starting:
            if self._listener is not None:
                return
            self._server = _Server(
                self._handle,
                request_factory=_make_request,
                handler_cancellation=True,
                access_log=None,
                keepalive_timeout=_KEEPALIVE_S,
            )
            loop = asyncio.get_running_loop()
            try:
                self._listener = await loop.create_server(self._server, self._host, self._port, backlog=_BACKLOG)
            except OSError as error:
                raise RunError(
                    f"rollout.agent.host, port: cannot listen at {self._host}:{self._port}: {error.strerror or error}"
                ) from error
            port = self._listener.sockets[0].getsockname()[1]
            self.sessions.base_url = f"http://{host_in_url(self._host)}:{port}/v1"

    async def aclose(self) -> None:
        """Close all sessions, and every connection."""
        for session in list(self.sessions.by_key.values()):
            session.close()
        listener, self._listener = self._listener, None
        server, self._server = self._server, None
        if listener is not None and server is not None:
            listener.close()
            server.pre_shutdown()  # ends idle connections, for whose next request `shutdown` would wait
            await server.shutdown(_END_TIMEOUT_S)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.removeprefix("/v1")
        kind = _EXCHANGES.get(path, ChatCompletion)
        try:
            session, is_trained = self._session(request)
            if request.method == "GET" and (path == "/models" or path.startswith("/models/")):
                return self._models(path.removeprefix("/models").removeprefix("/"))
            if request.method != "POST" or path not in _EXCHANGES:
                raise ApiError(
                    404,
                    "invalid_request_error",
                    f"there is no {request.method} {request.path}; there are POST /v1{', /v1'.join(_EXCHANGES)} and "
                    "GET /v1/models",
                )
            body = await _body(request, session.max_messages)
            exchange = kind(body, str(body.get("model") or self.sessions.model), session.api_state)
            if path == "/messages/count_tokens":
                return _json({"input_tokens": await session.prompt_length(exchange.call, is_trained=is_trained)})
            reply = await session.complete(exchange.call, exchange.id, is_trained=is_trained)
            answer = exchange.answer(reply)
            if exchange.is_stream:
                return web.Response(body=exchange.stream(answer), headers=_SSE)
            return _json(answer)
        except Exception as error:  # noqa: BLE001 - every request must get an answer
            answered = _api_error_of(error, request)
            return _json(kind.error(answered), answered.status)

    def _session(self, request: web.BaseRequest) -> tuple[AgentSession, bool]:
        """The session of the key in a request, and whether its calls are trained."""
        given = request.headers.get("authorization", "")
        key = given[7:] if given[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        key = key.strip()
        session = self.sessions.by_key.get(key)
        if session is None:
            raise unknown_key()
        return session, key == session.key

    def _models(self, name: str) -> web.Response:
        model = {
            "id": name or self.sessions.model,
            "object": "model",
            "created": 0,
            "owned_by": "grpo-async",
            "type": "model",
        }
        listed = {"object": "list", "data": [model], "has_more": False}
        return _json(model if name else listed)


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    return web.BaseRequest(
        message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=_MAX_REQUEST_BYTES
    )


async def _body(request: web.BaseRequest, max_messages: int) -> Mapping[str, Any]:
    """The JSON object of a request. One that no context can hold is refused here: to read it would hold up all other rollouts."""
    try:
        if (length := request.content_length or 0) > _MAX_REQUEST_BYTES:
            raise web.HTTPRequestEntityTooLarge(_MAX_REQUEST_BYTES, length)
        content = await request.read()  # ends when the connection does
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(f"{_MAX_REQUEST_BYTES} bytes, the most that is read") from error
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object")
    for name in ("messages", "input"):
        if isinstance(items := body.get(name), list) and len(items) > max_messages:
            raise _too_large(f"{max_messages} {name}, which no context of inference.max_model_len holds")
    return body


def _too_large(limit: str) -> ApiError:
    return ApiError(413, "invalid_request_error", f"the request has more than {limit}")


def _api_error_of(error: Exception, request: web.BaseRequest) -> ApiError:
    """The error that the client gets; unexpected errors are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return bad_request("the request holds lists or objects that are nested too deeply")
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    return ApiError(500, "server_error", "the endpoint failed; the run's log has the traceback")


def _json(content: Mapping[str, Any], status: int = 200) -> web.Response:
    # the standard library's json: a policy may write a lone surrogate, and integers of any size
    return web.Response(body=json.dumps(content).encode(), status=status, content_type="application/json")
