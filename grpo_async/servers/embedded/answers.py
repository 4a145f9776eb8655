"""Bodies in, JSON and errors out, and waits with a deadline for what answers need."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from grpo_async.errors import DeadlineError
from grpo_async.servers.embedded.receiver import UpdateFailedError, UpdateRefusedError, UpdateSupersededError
from grpo_async.servers.embedded.worker import EngineDeadError, SupersededError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request, Any], Awaitable[Response]]


class Rejected(HTTPException):
    """400 with a message."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


async def read(kind: type[Body], request: Request) -> Body:
    """The body of a request. Raises Rejected."""
    body = await request.body()  # the client sends it, or the connection ends
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Rejected(f"not a valid body: {_problems(error)}") from error


def read_query(kind: type[Body], request: Request) -> Body:
    """The query of a request. Raises Rejected."""
    try:
        return kind.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise Rejected(f"not a valid query: {_problems(error)}") from error


async def within(future: Future[Result], *, timeout_s: float) -> Result:
    """Await a command of the engine thread, which runs it before its next step.

    Raises:
        DeadlineError: the engine did not get to it in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise DeadlineError(
            "the engine to end its step",
            waited_s=timeout_s,
            setting="inference.heartbeat_timeout_s",
            hint="It is stuck, or the machine is too slow for prompts of this length.",
        ) from None


async def in_thread(function: Callable[[], Result], *, timeout_s: float, what: str) -> Result:
    """Run a blocking phase of an update in a daemon thread: one that waits for a dead trainer must not hold the process.

    Raises:
        DeadlineError: it did not end in time; nobody looks at its end any more.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # so that nobody cancels what cannot be cancelled

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting side
            future.set_exception(error)

    threading.Thread(target=run, name="weight-update", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise DeadlineError(what, waited_s=timeout_s, setting="weights.timeout_s") from None


async def _http_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _answer_nobody(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=400)  # the client left before its body was read; unhandled it would log a traceback


def _error_with(status: int) -> Handler:
    async def answer(request: Request, error: Exception) -> Response:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
        return JSONResponse({"error": str(error)}, status)

    return answer


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())


ERROR_HANDLERS: dict[Any, Handler] = {
    HTTPException: _http_error,
    UpdateRefusedError: _error_with(400),
    UpdateSupersededError: _error_with(409),
    SupersededError: _error_with(409),
    UpdateFailedError: _error_with(500),
    EngineDeadError: _error_with(503),
    DeadlineError: _error_with(503),
    ClientDisconnect: _answer_nobody,
}
"""What each error is answered with; for Starlette."""
