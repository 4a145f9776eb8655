"""The retry rule."""

from __future__ import annotations

import pytest

from grpo_async.errors import RequestRejectedError, ServerUnavailableError
from grpo_async.inference.connect import error_for_status


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, b'{"error": {"message": "bad id"}}', RequestRejectedError, "bad id"),
        (422, b'{"detail": "no"}', RequestRejectedError, "no"),
        (500, b"", ServerUnavailableError, "empty body"),
        (503, b"plain text", ServerUnavailableError, "plain text"),
    ],
)
def test_the_servers_message_is_found_wherever_it_stands(
    status: int, body: bytes, kind: type[Exception], words: str
) -> None:
    """R6.5: which answers are of which kind, and that the body is told."""
    error = error_for_status(status, body)
    assert type(error) is kind
    assert words in str(error)
