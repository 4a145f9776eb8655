"""The HTTP application of both engines (the paths of `inference.api`): it parses and checks requests, orders pauses
and weight updates, and answers. An `Engine` does the rest.

    400 the request is wrong | 409 out of order, or another call came in the meantime | 500 a weight update failed
    503 the engine is dead or does not answer, or the request is meant for another server

A client that disconnects ends its request; pauses and weight updates run to their end: half of one would be an unknown state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from grpo_async.errors import DeadlineError, GrpoAsyncError, message_of
from grpo_async.inference.api import (
    OUT_OF_ORDER,
    FinishBody,
    GenerateChunk,
    GenerateRequest,
    Paused,
    PauseQuery,
    ScoreAnswer,
    ScoreRequest,
    ServedParameters,
    ServerInfo,
    WeightInitInfo,
    WeightUpdateInfo,
)
from grpo_async.servers.requests import NOT_FINITE, EngineDeadError, RequestTracker
from grpo_async.utils.text import shortlist
from grpo_async.utils.validation import problems_of
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.buckets import update_problems, wrong_kind
from grpo_async.weights.receiver import NO_GROUP, UpdateRefusedError, parameter_specs

logger = logging.getLogger(__name__)

PARAMETERS_TIMEOUT_S = 120.0  # for `Engine.parameters`: reads three rows of every tensor from a disk that may be slow
_NDJSON = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)
NextChunk = Callable[[], Awaitable[GenerateChunk]]


class Engine(ABC):
    """The interface between the application and an inference engine, used from the application's event loop.

    Any method may raise EngineDeadError, and HTTPException for a call that cannot be made now.
    """

    def __init__(self, description: ServerInfo, *, revision: str | None) -> None:
        self.requests = RequestTracker()
        self.description = description  # the part of the server's info that never changes
        self.base = BaseWeights(description.model, revision=revision)  # to which pushed adapters are added

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the engine has stopped; None while it runs."""

    @property
    @abstractmethod
    def policy_version(self) -> int: ...

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """The fields of ServerInfo that the engine knows and that change. Returns without waiting for the engine."""

    async def prepare_stop_strings(self) -> None:  # noqa: B027 - not every engine has to
        """Called before a request with stop strings."""

    @abstractmethod
    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[NextChunk]:
        """Generate inside the context, which yields a function that waits for the next chunk; the last chunk has a finish reason or
        an error. Nothing else may run in the event loop between the call and the entry into the engine: the request enters under
        the version served now."""

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> ScoreAnswer: ...

    @abstractmethod
    async def parameters(self) -> ServedParameters: ...

    @abstractmethod
    async def pause(self, *, abort: bool, keep_cache: bool) -> None:
        """Freeze generation between two tokens, and tell `requests`. See `inference.api` for requests in flight."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def is_paused(self) -> bool:
        """Ask the engine itself, so that an answer shows that it is alive."""

    @abstractmethod
    async def join_weight_group(self, info: WeightInitInfo) -> None: ...

    async def check_update(self, info: WeightUpdateInfo) -> None:
        """Raise UpdateRefusedError if this update does not fit the model."""
        specs, served = parameter_specs(info), await self.parameters()
        if info.swap != served.swaps_adapters:
            raise UpdateRefusedError(wrong_kind(served))
        if info.base is not None and served.base_digest != info.base.digest:
            raise UpdateRefusedError("these adapters have a different base model than this server")
        problems = (update_problems if info.base is None else self.base.update_problems)(
            specs, served.shapes, served.optional
        )
        if problems:
            raise UpdateRefusedError(f"the update does not fit the served model: {shortlist(problems)}")

    @abstractmethod
    async def load_update(self, info: WeightUpdateInfo) -> None:
        """Make all workers receive every parameter and load it in place, while nothing is generated. If this raises, parts of the
        update may be loaded."""

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """The loaded weights are `version`: every token from now on carries it."""

    async def sleep(self) -> None:
        raise HTTPException(
            OUT_OF_ORDER, "this server cannot sleep: it needs inference.vllm.sleep_while_training and a GPU"
        )

    async def wake_up(self) -> None:
        raise HTTPException(OUT_OF_ORDER, "this server cannot sleep")


class RolloutApp:
    """The application `app` over `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests = engine.requests
        self._lock = asyncio.Lock()  # pauses and weight updates change what the engine does: one at a time
        self._has_group = False
        self._announced: WeightUpdateInfo | None = None  # set by /start_weight_update
        self._is_whole = True  # False: an update is loaded in part, or not finished
        self._is_loaded = False  # an update is loaded completely, but not finished
        gets = {
            "/health": self._health,
            "/rollout/info": self._info,
            "/rollout/parameters": self._parameters,
            "/is_paused": self._is_paused,
        }
        posts = {
            "/rollout/score": self._score,
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/init_weight_transfer_engine": self._join,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish_update,
        }
        kinds = (HTTPException, ValidationError, ClientDisconnect, GrpoAsyncError, Exception)
        self.app = Starlette(
            routes=[
                *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
                *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
                Route("/rollout/generate", _Streaming(self._generate), methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys(kinds, _answer_error),
        )

    # ---- state ----

    async def _health(self, _: Request) -> Response:
        failure = self._engine.failure
        return JSONResponse({"status": "ok"}) if failure is None else JSONResponse({"error": failure}, 503)

    async def _info(self, _: Request) -> Response:
        if self._engine.failure is not None:
            raise EngineDeadError(self._engine.failure)
        known = {"instance_id": self._requests.instance_id, "policy_version": self._engine.policy_version}
        counted = {
            "active_requests": self._requests.num_active,
            "generated_tokens": self._requests.num_generated_tokens,
            "busy_s": self._requests.busy_s,
        }
        return _json(self._engine.description.model_copy(update=known | counted | self._engine.stats()))

    # ---- generation ----

    async def _generate(self, request: Request, send: Send) -> None:
        wanted = await _read(GenerateRequest, request)
        mine = self._requests.instance_id
        if wanted.instance_id not in ("", mine):
            raise HTTPException(
                503, f"this request is for server {wanted.instance_id}, and this is {mine}: it has restarted"
            )
        self._check_tokens(wanted.token_ids, f"prompt tokens + max_tokens {wanted.max_tokens}", extra=wanted.max_tokens)
        self._check_tokens(wanted.stop_token_ids, "stop tokens")
        if wanted.top_logprobs > (size := self._engine.description.vocab_size):
            raise HTTPException(400, f"top_logprobs: {wanted.top_logprobs}, and the vocabulary has {size} tokens")
        if wanted.stop:
            await self._engine.prepare_stop_strings()
        await self._while_connected(self._stream(wanted, send), request)

    async def _stream(self, request: GenerateRequest, send: Send) -> None:
        await self._requests.gate.wait()
        async with self._engine.stream(request) as next_chunk:  # no await before this line: see Engine.stream
            await send({"type": "http.response.start", "status": 200, "headers": _NDJSON})
            has_more, offset = True, 0
            while has_more:
                chunk = await next_chunk()  # ends with the engine or the client's disconnect
                chunk = chunk.model_copy(update={"request_id": request.request_id, "offset": offset})
                offset += len(chunk.token_ids)
                has_more = chunk.finish_reason is None and chunk.error is None
                line = chunk.model_dump_json().encode() + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": has_more})

    async def _score(self, request: Request) -> Response:
        token_ids = (await _read(ScoreRequest, request)).token_ids
        self._check_tokens(token_ids, "tokens to score")
        answer = await self._while_connected(self._scored(token_ids), request)
        if not all(map(math.isfinite, answer.logprobs)):
            raise HTTPException(500, NOT_FINITE)
        return _json(answer)

    async def _scored(self, token_ids: Sequence[int]) -> ScoreAnswer:
        if not self._is_whole:
            await self._requests.gate.wait()
        return await self._engine.score(token_ids)

    async def _while_connected(self, work: Awaitable[Result], request: Request) -> Result:
        self._requests.num_active += 1
        try:
            return await unless_disconnected(work, request.receive)
        finally:
            self._requests.num_active -= 1

    def _check_tokens(self, token_ids: Sequence[int], what: str, *, extra: int = 0) -> None:
        size, limit = self._engine.description.vocab_size, self._engine.description.max_model_len
        if len(token_ids) + extra > limit:
            raise HTTPException(400, f"{len(token_ids)} {what} are more than inference.max_model_len: {limit}")
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = [token for token in token_ids if not 0 <= token < size]
            ids = shortlist(list(map(str, wrong)), ", ")
            raise HTTPException(400, f"token ids {ids} are outside the vocabulary of {size} tokens")

    # ---- pauses ----

    async def _pause(self, request: Request) -> Response:
        wanted = PauseQuery.model_validate(dict(request.query_params))
        self._requests.gate.close()
        try:
            async with self._lock:
                self._requests.gate.close()  # a /resume may have come before this got the lock
                await self._engine.pause(abort=wanted.mode == "abort", keep_cache=wanted.keep_cache)
                self._requests.flush()
                recomputed, computed = (0, 0) if wanted.keep_cache else self._requests.take_recomputed()
        except BaseException:
            if not self._requests.is_paused:
                self._requests.gate.open()
            raise
        return _json(Paused(is_paused=True, recomputed_tokens=recomputed, computed_tokens=computed))

    async def _resume(self, _: Request) -> Response:
        async with self._lock:
            if not self._is_whole:
                raise HTTPException(
                    OUT_OF_ORDER,
                    "this server has loaded part of a weight update, so it stays paused until it has received a complete one",
                )
            await self._engine.resume()
            self._requests.gate.open()
        return JSONResponse({"is_paused": False})

    async def _is_paused(self, request: Request) -> Response:
        # a probe ends with its client, so that probes of a hung engine do not pile up
        return JSONResponse({"is_paused": await unless_disconnected(self._engine.is_paused(), request.receive)})

    async def _sleep(self, _: Request) -> Response:
        async with self._lock:
            await self._engine.sleep()
            self._announced = None  # no update is loaded into memory that was given back
            self._requests.gate.close()
        return JSONResponse({"is_paused": True})

    async def _wake_up(self, request: Request) -> Response:
        async with self._lock:
            await self._engine.wake_up()
        return await self._resume(request)

    # ---- weight updates: join -> start -> update -> finish; from update to finish nothing is generated ----

    async def _parameters(self, request: Request) -> Response:
        return _json(await unless_disconnected(self._engine.parameters(), request.receive))

    async def _join(self, request: Request) -> Response:
        info = await _read(WeightInitInfo, request)
        async with self._lock:
            self._has_group, self._announced = False, None
            await self._engine.join_weight_group(info)
            self._has_group = True
        return JSONResponse({})

    async def _start_update(self, request: Request) -> Response:
        info = await _read(WeightUpdateInfo, request)
        async with self._lock:
            self._announced = None
            if not self._has_group:
                raise UpdateRefusedError(NO_GROUP)
            await self._engine.check_update(info)
            self._announced = info
        return JSONResponse({})

    async def _update(self, _: Request) -> Response:
        async with self._lock:
            info, self._announced = self._announced, None
            if info is None:
                raise HTTPException(OUT_OF_ORDER, "no update was started: POST /start_weight_update first")
            if not info.swap:
                if not await self._engine.is_paused():
                    raise HTTPException(OUT_OF_ORDER, "a server has to be paused to load an update: POST /pause first")
                self._is_whole = False
            self._is_loaded = False
            try:
                await self._engine.load_update(info)
            except BaseException:
                self._has_group = False
                raise
            self._is_loaded = True
        return JSONResponse({})

    async def _finish_update(self, request: Request) -> Response:
        version = int((await _read(FinishBody, request)).weight_version)
        async with self._lock:
            if self._is_loaded:
                await self._engine.finish_update(version)
                self._is_whole, self._is_loaded = True, False
            elif not self._is_whole or version != self._engine.policy_version:  # else the client lost our answer
                raise HTTPException(
                    OUT_OF_ORDER,
                    f"there is no loaded update to serve as version {version}: POST /start_weight_update and /update_weights",
                )
        return JSONResponse({})


# ---- HTTP ----


async def unless_disconnected(work: Awaitable[Result], receive: Receive) -> Result:
    """Await `work`, and cancel it when the client disconnects. Call it after the body has been read."""
    me = asyncio.current_task()
    assert me is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        me.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError as error:
        if not watching.done() or me.uncancel() > 0:
            raise  # somebody else cancelled this task
        raise ClientDisconnect from error
    finally:
        watching.cancel()


class _Streaming:
    """A plain ASGI app: starlette's own wrappers cost a task group for each streamed response."""

    def __init__(self, answer: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):  # nobody reads the response
            await self._answer(Request(scope, receive), send)


async def _read(kind: type[Body], request: Request) -> Body:
    return kind.model_validate_json(await request.body())


def _json(content: BaseModel) -> Response:
    return Response(content.model_dump_json(), media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    status, message = 500, message_of(error)  # uvicorn logs unexpected errors
    match error:
        case HTTPException():
            status, message = error.status_code, error.detail
            if status in (404, 405):
                message = f"{request.method} {request.url.path}: {message}"
        case ValidationError():
            status, message = 400, problems_of(error)
        case UpdateRefusedError():
            status = 400
        case EngineDeadError() | DeadlineError():
            status = 503
    if status >= 500 and not isinstance(error, ClientDisconnect):
        logger.warning("%s %s: %s", request.method, request.url.path, message)
    return JSONResponse({"error": message}, status)
