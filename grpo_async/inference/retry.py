"""Which failures of the inference server are retried (by the rule of `grpo_async.retry`), and the error of each answer >= 400."""

from __future__ import annotations

import httpx

from grpo_async.errors import InferenceError, RequestRejectedError, ServerUnavailableError
from grpo_async.retry import server_message


def is_retriable(error: Exception) -> bool:
    """True for what may go away by itself: no connection, a broken one, or a server-side error."""
    return isinstance(error, httpx.TransportError | ServerUnavailableError)


def error_for_status(status: int, body: bytes) -> InferenceError:
    """The error for an answer >= 400, with the server's own message."""
    message = server_message(body)
    if status >= 500:
        return ServerUnavailableError(f"the inference server answered {status}: {message}", answered=True)
    return RequestRejectedError(status, message)
