"""Bodies in, JSON and errors out, on bare ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from grpo_async.inference.guard import Receive, Send

Result = TypeVar("Result")


class RefusedError(Exception):
    """A call that is answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class DisconnectedError(Exception):
    """The client is gone: nobody reads an answer."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Raises DisconnectedError."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Await `work`, and cancel it when the client disconnects. Call it after the body was read.

    Raises:
        DisconnectedError: the client left first. Else what `work` raises.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        leaving.cancel()
        if working.cancel():
            await asyncio.wait({working})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def status_and_message(error: RefusedError | ValidationError) -> tuple[int, str]:
    if isinstance(error, RefusedError):
        return error.status, str(error)
    problems = (f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
    return 400, "; ".join(problems)


async def send_error(send: Send, status: int, message: str) -> None:
    """`{"error": message}`."""
    await send_json(send, status, {"error": message or HTTPStatus(status).phrase})


async def send_json(send: Send, status: int, content: Mapping[str, Any]) -> None:
    body = orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
