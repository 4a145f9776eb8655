"""The HTTP surface of `inference.surface` over an engine worker: parses, checks, translates errors to statuses.

    400 the request is wrong | 409 somebody else began anew | 500 a weight transfer failed | 504 not drained in time
    503 the engine is dead or does not answer, or the request was meant for another server

Runs in one asyncio loop; the engine lives in its own thread, and everything that concerns it is a command of that thread.
Receiving an update is not: it waits for the trainer in a thread of its own while the engine goes on, and its result is loaded by
one command, together with its version. A client that disconnects aborts its request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from grpo_async.errors import DeadlineError
from grpo_async.inference.guard import TokenGuard
from grpo_async.inference.surface import (
    GENERATE_PATH,
    INFO_PATH,
    PARAMETERS_PATH,
    SCORE_PATH,
    FinishBody,
    GenerateChunk,
    GenerateRequest,
    InitBody,
    PauseQuery,
    ScoreAnswer,
    ScoreRequest,
    ServerInfo,
    UpdateBody,
)
from grpo_async.servers.embedded.engine import RunningSequence, SlotEngine
from grpo_async.servers.embedded.receiver import EmbeddedReceiver
from grpo_async.servers.embedded.worker import Chunks, EngineDeadError, EngineWorker, SupersededError
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.participants import NOT_ARRIVED, start
from grpo_async.weights.receiver import UpdateFailedError, UpdateRefusedError, UpdateSupersededError

logger = logging.getLogger(__name__)

_NDJSON = [(b"content-type", b"application/x-ndjson")]
_READ_TIMEOUT_S = 120.0  # three rows of every tensor, from a disk that may be slow
_ANSWER_MARGIN_S = 15.0  # the trainer's deadline holds below; this is for the answer

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request, Any], Awaitable[Response]]


class EmbeddedService:
    """Owns the worker thread of `engine` and answers HTTP for it.

    Args:
        engine: handed over; nobody else may touch it any more.
        info: what does not change of the server's description; instance, vocabulary and number of slots are filled in here.
            Adapters are added to the weights of `info.model`.
        on_failure: called in the event loop after the engine failed and every request was told.
        engine_timeout_s: for the engine to end its step, after which an answer is 503.
    """

    def __init__(
        self, engine: SlotEngine, *, info: ServerInfo, on_failure: Callable[[], None], engine_timeout_s: float = 60.0
    ) -> None:
        self._engine = engine
        known = {"vocab_size": engine.vocab_size, "max_running_requests": engine.num_slots}
        self._info = info.model_copy(update={"instance_id": secrets.token_hex(8), **known})
        self._on_failure = on_failure
        self._engine_timeout_s = engine_timeout_s
        self._worker = EngineWorker(engine, deliver=self._deliver, on_failure=lambda _: self._tell_failure())
        self._receiver = EmbeddedReceiver(
            engine.parameters(), tied=engine.tied_names(), device=engine.device, base=BaseWeights(info.model)
        )
        self._update_started = False
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route(INFO_PATH, self._describe, methods=["GET"]),
            Route(PARAMETERS_PATH, self._parameters, methods=["GET"]),
            Route(GENERATE_PATH, _Endpoint(self._generate), methods=["POST"]),
            Route(SCORE_PATH, self._score, methods=["POST"]),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused, methods=["GET"]),
            Route("/init_weight_transfer_engine", self._init_weight_transfer, methods=["POST"]),
            Route("/start_weight_update", self._start_update, methods=["POST"]),
            Route("/update_weights", self._update, methods=["POST"]),
            Route("/finish_weight_update", self._finish_update, methods=["POST"]),
        ]
        self.app = TokenGuard(Starlette(routes=routes, exception_handlers=_ERROR_HANDLERS))

    def start(self) -> None:
        """Start generating; call it in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()

    async def stop(self, *, timeout_s: float) -> None:
        """End every request with reason "abort" and the engine thread; takes `timeout_s` at most."""
        await asyncio.to_thread(self._worker.stop, timeout_s=timeout_s)

    # The engine thread's side.

    def _deliver(self, chunks: Chunks) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_hand_out, chunks)

    def _tell_failure(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_failure)

    async def _command(self, command: Callable[[], Result]) -> Result:
        """Run `command` in the engine thread, before its next step.

        Raises:
            DeadlineError: the engine did not get to it in time.
        """
        try:
            async with asyncio.timeout(self._engine_timeout_s):
                return await asyncio.wrap_future(self._worker.call(command))
        except TimeoutError:
            raise DeadlineError(
                "the engine to end its step",
                waited_s=self._engine_timeout_s,
                setting="inference.heartbeat_timeout_s",
                hint="It is stuck, or the machine is too slow for prompts of this length.",
            ) from None

    # Generation.

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Plain ASGI: starlette's streaming response costs a task group per request.
        request = await _read(GenerateRequest, Request(scope, receive))
        if request.instance_id not in ("", self._info.instance_id):
            raise HTTPException(
                503,
                f"this request is meant for server {request.instance_id}, and this is {self._info.instance_id}: it has "
                "restarted since",
            )
        problem = self._engine.problem_with(request)
        if problem is not None:
            raise HTTPException(400, problem)
        if self._worker.failure is not None:
            raise EngineDeadError(self._worker.failure)
        chunks: asyncio.Queue[GenerateChunk] = asyncio.Queue()
        sequence = RunningSequence(request, eos_ids=self._engine.eos_ids, sink=chunks.put_nowait)
        self._worker.call(lambda: self._engine.add(sequence)).add_done_callback(
            lambda future: self._report_lost(future, chunks)
        )
        ended = False
        watcher = asyncio.ensure_future(_until_disconnect(receive))
        watcher.add_done_callback(lambda _: None if ended else self._abort(sequence))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _NDJSON})
            while not ended:
                chunk = await chunks.get()  # the engine ends it, or the abort that follows a disconnect
                ended = chunk.finish_reason is not None or chunk.error is not None
                line = chunk.model_dump_json().encode() + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": not ended})
        finally:
            watcher.cancel()  # its callback aborts what has not ended

    async def _score(self, request: Request) -> Response:
        token_ids = (await _read(ScoreRequest, request)).token_ids
        problem = self._engine.problem_with_score(token_ids)
        if problem is not None:
            raise HTTPException(400, problem)
        # One command, so no update comes between the scores and their version. Also while paused: nothing is generated.
        scores, version = await self._command(lambda: (self._engine.score(token_ids), self._engine.policy_version))
        if not all(map(math.isfinite, scores)):
            raise HTTPException(500, "the model's logits are not finite; the pushed weights are broken")
        return JSONResponse(ScoreAnswer(logprobs=scores, policy_version=version).model_dump())

    def _abort(self, sequence: RunningSequence) -> None:
        self._worker.call(lambda: self._engine.abort(sequence))

    def _report_lost(self, added: Future[None], chunks: asyncio.Queue[GenerateChunk]) -> None:
        """The engine ended before it took the request, so nobody else will answer."""
        error = added.exception()
        if error is not None:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(chunks.put_nowait, GenerateChunk(error=str(error)))

    # State.

    async def _health(self, _: Request) -> Response:
        if self._worker.failure is not None:
            return JSONResponse({"error": self._worker.failure}, 503)
        return JSONResponse({"status": "ok"})

    async def _describe(self, _: Request) -> Response:
        if self._worker.failure is not None:
            raise EngineDeadError(self._worker.failure)
        return JSONResponse(self._info.model_dump() | self._worker.figures | {"busy_s": self._worker.busy_s})

    async def _pause(self, request: Request) -> Response:
        wanted = _parse(PauseQuery, dict(request.query_params), "query")
        frozen = await self._command(lambda: self._worker.pause(wanted.mode, keep_cache=wanted.keep_cache))
        ended = asyncio.wrap_future(frozen)
        await asyncio.wait({ended}, timeout=wanted.timeout_s)
        if not ended.done() and await self._command(lambda: self._worker.give_up_drain(frozen)):
            raise HTTPException(
                504,
                f"requests in flight have not ended within {wanted.timeout_s:g} s, so the server is not paused; raise "
                "weights.drain_timeout_s if this is expected",
            )
        await asyncio.wait_for(ended, self._engine_timeout_s)
        return JSONResponse({"is_paused": True})

    async def _resume(self, _: Request) -> Response:
        await self._command(self._worker.resume)
        return JSONResponse({"is_paused": False})

    async def _is_paused(self, _: Request) -> Response:
        is_paused = await self._command(lambda: self._worker.is_paused)
        return JSONResponse({"is_paused": is_paused})

    # Weight updates.

    async def _parameters(self, _: Request) -> Response:
        described = await _in_thread(
            self._receiver.describe, timeout_s=_READ_TIMEOUT_S, what="a look at the model's files"
        )
        return JSONResponse(described.model_dump())

    async def _init_weight_transfer(self, request: Request) -> Response:
        info = (await _read(InitBody, request)).init_info
        self._update_started = False
        join = self._receiver.join(info)
        await _in_thread(join, timeout_s=info.timeout_s + _ANSWER_MARGIN_S, what="the weight group to form")
        return JSONResponse({})

    async def _start_update(self, _: Request) -> Response:
        self._update_started = False
        self._receiver.drop()
        self._receiver.check_group()
        self._update_started = True
        return JSONResponse({})

    async def _update(self, request: Request) -> Response:
        info = (await _read(UpdateBody, request)).update_info
        if not self._update_started:
            raise UpdateRefusedError("no update was started; call /start_weight_update first")
        self._update_started = False
        receive = self._receiver.receive(info)
        try:
            await _in_thread(receive, timeout_s=info.timeout_s + _ANSWER_MARGIN_S, what="the weights to arrive")
        except DeadlineError as error:
            self._receiver.drop()
            raise UpdateFailedError(f"{NOT_ARRIVED}, the old ones stay: {error}") from error
        return JSONResponse({})

    async def _finish_update(self, request: Request) -> Response:
        version = int((await _read(FinishBody, request)).weight_version)
        weights = self._receiver.take()
        if weights is not None:
            named = dict(weights)
            await self._command(lambda: self._worker.load_weights(named, policy_version=version))
            return JSONResponse({})
        current = await self._command(lambda: self._engine.policy_version)
        if version != current:
            raise UpdateRefusedError(
                f"there is no staged update to serve as version {version}; call /start_weight_update and /update_weights"
            )
        return JSONResponse({})  # a client that lost the first answer


class _Endpoint:
    """Makes a coroutine function a plain ASGI app, which starlette passes through untouched."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _hand_out(chunks: Chunks) -> None:
    for sequence, chunk in chunks:
        sequence.sink(chunk)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # cancelled when the answer is complete
        pass


async def _read(kind: type[Body], request: Request) -> Body:
    """The body of a request. Raises HTTPException 400."""
    return _parse(kind, await request.body(), "body")  # the client sends it, or the connection ends


def _parse(kind: type[Body], given: bytes | dict[str, str], what: str) -> Body:
    try:
        return kind.model_validate_json(given) if isinstance(given, bytes) else kind.model_validate(given)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
        raise HTTPException(400, f"not a valid {what}: {'; '.join(problems)}") from error


async def _in_thread(function: Callable[[], Result], *, timeout_s: float, what: str) -> Result:
    """Run a blocking phase of an update in a daemon thread: one that waits for a dead trainer must not hold the process.

    Raises:
        DeadlineError: it did not end in time; nobody looks at its end any more.
    """
    future = start(function, name="weight-update")
    done = asyncio.wrap_future(future)
    await asyncio.wait({done}, timeout=timeout_s)
    if not done.done():
        done.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody else takes it
        raise DeadlineError(what, waited_s=timeout_s, setting="weights.timeout_s")
    return done.result()


def _error_with(status: int) -> Handler:
    async def answer(request: Request, error: Exception) -> Response:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
        return JSONResponse({"error": str(error)}, status)

    return answer


async def _http_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _answer_nobody(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client left before its body was read; unhandled it would log a traceback


_ERROR_HANDLERS: dict[Any, Handler] = {
    HTTPException: _http_error,
    UpdateRefusedError: _error_with(400),
    UpdateSupersededError: _error_with(409),
    SupersededError: _error_with(409),
    UpdateFailedError: _error_with(500),
    EngineDeadError: _error_with(503),
    DeadlineError: _error_with(503),
    ClientDisconnect: _answer_nobody,
}
