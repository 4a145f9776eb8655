"""What every connection to a server needs: the run's token, trusted certificates, and the error for each bad answer."""

from __future__ import annotations

import functools
import ssl

from grpo_async.errors import (
    BadResponseError,
    DeadlineError,
    InferenceError,
    RequestRejectedError,
    ServerUnavailableError,
)
from grpo_async.utils.retry import server_message


def authorization(token: str | None) -> dict[str, str]:
    """The header with the bearer token; empty without a token."""
    return {"authorization": f"Bearer {token}"} if token else {}


@functools.cache
def trusted_certificates() -> ssl.SSLContext:
    """Return the TLS context with the certificates of the system or of $SSL_CERT_FILE, loaded once."""
    return ssl.create_default_context()


def error_for_status(status: int, body: bytes) -> InferenceError:
    """The error for an answer other than 200, with the server's own message. ServerUnavailableError is retried (utils.retry)."""
    message = server_message(body)
    if status < 400:
        return BadResponseError(f"the server answered {status} and not 200, as a proxy does that redirects: {message}")
    if status >= 500:
        return ServerUnavailableError(f"the inference server answered {status}: {message}", answered=True)
    return RequestRejectedError(status, message)


def is_answer(error: Exception) -> bool:
    """Whether the server answered, though with an error."""
    if isinstance(error, ServerUnavailableError):
        return error.answered
    return not isinstance(error, DeadlineError)
