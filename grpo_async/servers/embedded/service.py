"""The HTTP surface of `inference.surface` over an engine worker: parses, checks, translates errors to statuses.

    400 the request is wrong | 500 a weight transfer failed | 503 the engine is dead or does not answer

Runs in one asyncio loop; the engine lives in its own thread. A client that disconnects aborts its request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
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

from grpo_async.inference.guard import TokenGuard
from grpo_async.inference.surface import (
    GENERATE_PATH,
    INFO_PATH,
    GenerateChunk,
    GenerateRequest,
    GlooInitInfo,
    GlooUpdateInfo,
    Message,
    ServerInfo,
)
from grpo_async.servers.embedded.engine import SlotEngine
from grpo_async.servers.embedded.receiver import UpdateFailedError, UpdateRefusedError, WeightReceiver
from grpo_async.servers.embedded.sequence import RunningSequence
from grpo_async.servers.embedded.worker import Chunks, EngineDeadError, EngineWorker

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)

_ENGINE_TIMEOUT_S = 60.0  # a command waits for one step at most; the longest is a prefill of long prompts
_NDJSON = [(b"content-type", b"application/x-ndjson")]


class _InitBody(Message):
    init_info: GlooInitInfo


class _UpdateBody(Message):
    update_info: GlooUpdateInfo


class _FinishBody(Message):
    weight_version: str


class _Rejected(HTTPException):
    """400 with a message."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class EmbeddedService:
    """Owns the worker thread of `engine` and answers HTTP for it.

    Args:
        engine: handed over; nobody else may touch it any more.
        info: what does not change of the server's description.
        on_failure: called in the event loop after the engine failed and every request was told.
    """

    def __init__(self, engine: SlotEngine, *, info: ServerInfo, on_failure: Callable[[], None]) -> None:
        self._engine = engine
        self._info = info
        self._on_failure = on_failure
        self._receiver = WeightReceiver(engine.parameters())
        self._worker = EngineWorker(engine, deliver=self._deliver, on_failure=lambda _: self._tell_failure())
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route(INFO_PATH, self._describe, methods=["GET"]),
            Route(GENERATE_PATH, _Endpoint(self._generate), methods=["POST"]),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused, methods=["GET"]),
            Route("/init_weight_transfer_engine", self._init_weight_transfer, methods=["POST"]),
            Route("/start_weight_update", self._start_update, methods=["POST"]),
            Route("/update_weights", self._update, methods=["POST"]),
            Route("/finish_weight_update", self._finish_update, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            HTTPException: _http_error,
            UpdateRefusedError: _error_with(400),
            UpdateFailedError: _error_with(500),
            EngineDeadError: _error_with(503),
            TimeoutError: _error_with(503),
            ClientDisconnect: _answer_nobody,
        }
        self.app = TokenGuard(Starlette(routes=routes, exception_handlers=handlers))

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

    # Generation.

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Plain ASGI: starlette's streaming response costs a task group per request.
        request = _parse(GenerateRequest, await Request(scope, receive).body())
        problem = self._engine.problem_with(request)
        if problem is not None:
            raise _Rejected(problem)
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
                chunk = await chunks.get()
                ended = chunk.finish_reason is not None or chunk.error is not None
                line = chunk.model_dump_json().encode() + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": not ended})
        finally:
            watcher.cancel()  # its callback aborts what has not ended

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
        return JSONResponse((await self._call(self._snapshot)).model_dump())

    def _snapshot(self) -> ServerInfo:
        return self._info.model_copy(
            update={
                "policy_version": self._engine.policy_version,
                "active_requests": self._engine.num_active,
                "generated_tokens": self._engine.num_generated_tokens,
                "busy_s": self._worker.busy_s,
            }
        )

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "keep")
        if mode != "keep":
            raise _Rejected(f"mode={mode}: the embedded engine knows `keep` only")
        await _within(self._worker.pause())
        return JSONResponse({"is_paused": True})

    async def _resume(self, _: Request) -> Response:
        await _within(self._worker.resume())
        return JSONResponse({"is_paused": False})

    async def _is_paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": await self._call(lambda: self._worker.is_paused)})

    # Weights.

    async def _init_weight_transfer(self, request: Request) -> Response:
        info = _parse(_InitBody, await request.body()).init_info
        await _in_thread(lambda: self._receiver.join(info))
        return JSONResponse({})

    async def _start_update(self, _: Request) -> Response:
        await _in_thread(self._receiver.start)
        return JSONResponse({})

    async def _update(self, request: Request) -> Response:
        info = _parse(_UpdateBody, await request.body()).update_info
        await _in_thread(lambda: self._receiver.receive(info))
        return JSONResponse({})

    async def _finish_update(self, request: Request) -> Response:
        text = _parse(_FinishBody, await request.body()).weight_version
        try:
            version = int(text)
        except ValueError:
            raise _Rejected(f"weight_version: {text!r} is not a whole number") from None
        current = await self._call(lambda: self._engine.policy_version)
        weights = await _in_thread(lambda: self._receiver.take(version_is_new=version != current))

        def apply() -> None:
            # One command: no token can be sampled from the new weights under the old version, paused or not.
            self._engine.set_version(version)
            if weights:
                self._engine.load_weights(weights)

        await self._call(apply)
        return JSONResponse({})

    async def _call(self, command: Callable[[], Result]) -> Result:
        return await _within(self._worker.call(command))


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
    while (await receive())["type"] != "http.disconnect":
        pass


async def _within(future: Future[Result]) -> Result:
    """Await a command of the engine thread.

    Raises:
        TimeoutError: the engine did not get to it in time.
    """
    try:
        async with asyncio.timeout(_ENGINE_TIMEOUT_S):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise TimeoutError(
            f"the engine did not answer within {_ENGINE_TIMEOUT_S:.0f} s; it is stuck in a step"
        ) from None


async def _in_thread(function: Callable[[], Result]) -> Result:
    """Run a blocking phase of an update in a daemon thread: one that waits for a dead trainer must not hold the process."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting side
            future.set_exception(error)

    threading.Thread(target=run, name="weight-update", daemon=True).start()
    return await asyncio.wrap_future(future)


def _parse(kind: type[Body], body: bytes) -> Body:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
        raise _Rejected(f"not a valid body: {problems}") from error


async def _http_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _answer_nobody(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client left before its body was read; unhandled it would log a traceback


def _error_with(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
        return JSONResponse({"error": str(error)}, status)

    return answer
