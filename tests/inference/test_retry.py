"""The retry rule."""

from __future__ import annotations

import random

import pytest

from grpo_async.errors import RequestRejectedError, ServerUnavailableError
from grpo_async.inference.retry import error_for_status
from grpo_async.utils.retry import RetryPolicy


def test_delays_double_and_stop_growing() -> None:
    policy = RetryPolicy(base_s=0.2, max_s=1.0, rng=random.Random(0))
    for attempt, longest in enumerate([0.2, 0.4, 0.8, 1.0, 1.0]):
        delays = [policy.delay_s(attempt) for _ in range(50)]
        assert longest / 2 <= min(delays) <= max(delays) <= longest


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
