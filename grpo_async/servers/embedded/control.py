"""The control routes: pause, resume, the liveness probe, and weight updates.

Everything that concerns the engine is a command of its thread. Receiving an update is not: it waits for the trainer in a
thread of its own while the engine goes on, and its result is applied in one command, together with its version.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_async.errors import DeadlineError
from grpo_async.inference.surface import (
    PARAMETERS_PATH,
    FinishBody,
    InitBody,
    PauseQuery,
    UpdateBody,
)
from grpo_async.servers.embedded.answers import in_thread, read, read_query, within
from grpo_async.servers.embedded.engine import SlotEngine
from grpo_async.servers.embedded.receiver import UpdateFailedError, UpdateRefusedError, WeightReceiver
from grpo_async.servers.embedded.worker import EngineWorker
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.blame import NOT_ARRIVED

_READ_TIMEOUT_S = 120.0  # three rows of every tensor, from a disk that may be slow
_ANSWER_MARGIN_S = 15.0  # the trainer's deadline holds below; this is for the answer


class Control:
    """Handlers over one worker; used from one event loop.

    Args:
        engine: of `worker`; what is read here never changes.
        timeout_s: for the engine to get to a command.
        model_path: folder or hub name that the engine was loaded from; pushed adapters are added to those weights.
    """

    def __init__(self, worker: EngineWorker, engine: SlotEngine, *, timeout_s: float, model_path: str) -> None:
        self._worker = worker
        self._engine = engine
        self._timeout_s = timeout_s
        self._receiver = WeightReceiver(
            engine.parameters(), tied=engine.tied_names(), device=engine.device, base=BaseWeights(model_path)
        )
        self.routes = [
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused, methods=["GET"]),
            Route(PARAMETERS_PATH, self._parameters, methods=["GET"]),
            Route("/init_weight_transfer_engine", self._init_weight_transfer, methods=["POST"]),
            Route("/start_weight_update", self._start_update, methods=["POST"]),
            Route("/update_weights", self._update, methods=["POST"]),
            Route("/finish_weight_update", self._finish_update, methods=["POST"]),
        ]

    async def _pause(self, request: Request) -> Response:
        wanted = read_query(PauseQuery, request)
        beginning = self._worker.pause(wanted.mode, keep_cache=wanted.keep_cache)
        frozen = await within(beginning, timeout_s=self._timeout_s)
        ended = asyncio.wrap_future(frozen)
        await asyncio.wait({ended}, timeout=wanted.timeout_s)
        if not ended.done() and await within(self._worker.give_up_drain(frozen), timeout_s=self._timeout_s):
            raise HTTPException(
                504,
                f"requests in flight have not ended within {wanted.timeout_s:g} s, so the server is not paused; raise "
                "weights.drain_timeout_s if this is expected",
            )
        await asyncio.wait_for(ended, self._timeout_s)
        return JSONResponse({"is_paused": True})

    async def _resume(self, _: Request) -> Response:
        await within(self._worker.resume(), timeout_s=self._timeout_s)
        return JSONResponse({"is_paused": False})

    async def _is_paused(self, _: Request) -> Response:
        is_paused = self._worker.call(lambda: self._worker.is_paused)
        return JSONResponse({"is_paused": await within(is_paused, timeout_s=self._timeout_s)})

    async def _parameters(self, _: Request) -> Response:
        described = await in_thread(
            self._receiver.describe, timeout_s=_READ_TIMEOUT_S, what="a look at the model's files"
        )
        return JSONResponse(described.model_dump())

    async def _init_weight_transfer(self, request: Request) -> Response:
        info = (await read(InitBody, request)).init_info
        limit_s = _limit_s(info.timeout_s)
        await in_thread(lambda: self._receiver.join(info), timeout_s=limit_s, what="the weight group to form")
        return JSONResponse({})

    async def _start_update(self, _: Request) -> Response:
        self._receiver.start()
        return JSONResponse({})

    async def _update(self, request: Request) -> Response:
        info = (await read(UpdateBody, request)).update_info
        limit_s = _limit_s(info.timeout_s)
        try:
            await in_thread(lambda: self._receiver.receive(info), timeout_s=limit_s, what="the weights to arrive")
        except DeadlineError as error:
            self._receiver.drop()
            raise UpdateFailedError(f"{NOT_ARRIVED}, the old ones stay: {error}") from error
        return JSONResponse({})

    async def _finish_update(self, request: Request) -> Response:
        version = int((await read(FinishBody, request)).weight_version)
        weights = self._receiver.take()
        if weights is not None:
            await within(self._worker.load_weights(weights, policy_version=version), timeout_s=self._timeout_s)
            return JSONResponse({})
        current = await within(self._worker.call(lambda: self._engine.policy_version), timeout_s=self._timeout_s)
        if version != current:
            raise UpdateRefusedError(
                f"there is no staged update to serve as version {version}; call /start_weight_update and /update_weights"
            )
        return JSONResponse({})  # a client that lost the first answer


def _limit_s(timeout_s: float) -> float:
    return (timeout_s if 0.0 < timeout_s < float("inf") else 0.0) + _ANSWER_MARGIN_S  # others are refused at once
