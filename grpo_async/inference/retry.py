"""The error of each answer >= 400: ServerUnavailableError is retried, by the rule of `grpo_async.utils.retry`."""

from __future__ import annotations

from grpo_async.errors import InferenceError, RequestRejectedError, ServerUnavailableError
from grpo_async.utils.retry import server_message


def error_for_status(status: int, body: bytes) -> InferenceError:
    """The error for an answer >= 400, with the server's own message."""
    message = server_message(body)
    if status >= 500:
        return ServerUnavailableError(f"the inference server answered {status}: {message}", answered=True)
    return RequestRejectedError(status, message)
