"""The HTTP surface of `inference.surface` over an engine worker: parses, checks, translates errors to statuses.

    400 the request is wrong | 409 somebody else began anew | 500 a weight transfer failed | 504 not drained in time
    503 the engine is dead or does not answer, or the request was meant for another server

Runs in one asyncio loop; the engine lives in its own thread. A client that disconnects aborts its request.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from grpo_async.inference.guard import TokenGuard
from grpo_async.inference.surface import (
    GENERATE_PATH,
    INFO_PATH,
    SCORE_PATH,
    GenerateChunk,
    GenerateRequest,
    ScoreAnswer,
    ScoreRequest,
    ServerInfo,
)
from grpo_async.servers.embedded.answers import ERROR_HANDLERS, Rejected, read, within
from grpo_async.servers.embedded.control import Control
from grpo_async.servers.embedded.engine import SlotEngine
from grpo_async.servers.embedded.sequence import RunningSequence
from grpo_async.servers.embedded.worker import Chunks, EngineDeadError, EngineWorker

_NDJSON = [(b"content-type", b"application/x-ndjson")]


class EmbeddedService:
    """Owns the worker thread of `engine` and answers HTTP for it.

    Args:
        engine: handed over; nobody else may touch it any more.
        info: what does not change of the server's description; instance, vocabulary and number of slots are filled in here.
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
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route(INFO_PATH, self._describe, methods=["GET"]),
            Route(GENERATE_PATH, _Endpoint(self._generate), methods=["POST"]),
            Route(SCORE_PATH, self._score, methods=["POST"]),
            *Control(self._worker, engine, timeout_s=engine_timeout_s, model_path=info.model).routes,
        ]
        self.app = TokenGuard(Starlette(routes=routes, exception_handlers=ERROR_HANDLERS))

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
        request = await read(GenerateRequest, Request(scope, receive))
        if request.instance_id not in ("", self._info.instance_id):
            raise HTTPException(
                503,
                f"this request is meant for server {request.instance_id}, and this is {self._info.instance_id}: it has "
                "restarted since",
            )
        problem = self._engine.problem_with(request)
        if problem is not None:
            raise Rejected(problem)
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
        token_ids = (await read(ScoreRequest, request)).token_ids
        problem = self._engine.problem_with_score(token_ids)
        if problem is not None:
            raise Rejected(problem)
        # One command, so no update comes between the scores and their version. Also while paused: nothing is generated.
        command = self._worker.call(lambda: (self._engine.score(token_ids), self._engine.policy_version))
        scores, version = await within(command, timeout_s=self._engine_timeout_s)
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
