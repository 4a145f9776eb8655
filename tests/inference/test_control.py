"""The control calls against a server that refuses, is busy, or is not there."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator

import pytest

from grpo_async.errors import RequestRejectedError, ServerUnavailableError
from grpo_async.inference.control import ServerControl
from grpo_async.retry import RetryPolicy
from tests.support.local_server import Refusal, Request, local_server


def _control(url: str) -> ServerControl:
    retry = RetryPolicy(max_retries=2, base_s=0.001, rng=random.Random(0))
    return ServerControl(url, token=None, timeout_s=10.0, retry=retry)


@pytest.mark.parametrize(
    ("status", "kind", "words", "num_requests"),
    [
        (404, RequestRejectedError, "404: what is missing", 1),
        (503, ServerUnavailableError, "3 times.*503: what is missing", 3),
    ],
)
def test_a_refusal_is_raised_at_once_and_a_busy_server_asked_again_a_bounded_number_of_times(
    status: int, kind: type[Exception], words: str, num_requests: int
) -> None:
    """R6.5: for the calls around a weight push as for generation, with the server's own words."""

    async def refuse(request: Request) -> AsyncIterator[bytes]:
        raise Refusal(status, "what is missing")
        yield b""

    with local_server(refuse) as server, _control(server.url) as control:
        with pytest.raises(kind, match=words):
            control.pause()
        assert len(server.requests) == num_requests


def test_a_server_that_is_not_there_is_asked_again_a_bounded_number_of_times() -> None:
    """R6.5: connection errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"  # bound and not listening: refused
        with _control(url) as control, pytest.raises(ServerUnavailableError, match="failed 3 times"):
            control.resume()


def test_an_update_is_never_asked_for_again() -> None:
    """R6.5: the broadcast that goes with it cannot be repeated."""

    async def busy(request: Request) -> AsyncIterator[bytes]:
        raise Refusal(503, "busy")
        yield b""

    fields = {"names": [], "dtype_names": [], "shapes": [], "bucket_bytes": 1, "timeout_s": 1.0}
    with local_server(busy) as server, _control(server.url) as control:
        with pytest.raises(ServerUnavailableError):
            control.update_weights(fields, timeout_s=5.0)
        assert len(server.requests) == 1
