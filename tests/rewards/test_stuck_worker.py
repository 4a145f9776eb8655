"""A worker process that neither reads nor ends: SIGSTOP, as a debugger or an overfull machine does it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from grpo_async.rewards.workers import WorkerProcess
from tests.rewards.helpers import TRL

MORE_THAN_A_SOCKET_HOLDS = b"x" * 8_000_000


@pytest.fixture
def stopped_worker() -> Iterator[WorkerProcess]:
    worker = WorkerProcess(f"{TRL}:length_target")
    try:
        worker.wait_until_ready(60.0)
        os.kill(worker._process.pid, signal.SIGSTOP)
        yield worker
    finally:
        worker.kill()
        worker.close()


def test_a_request_that_the_worker_does_not_take_times_out(stopped_worker: WorkerProcess) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        stopped_worker.exchange(MORE_THAN_A_SOCKET_HOLDS, 0.5)
    assert 0.4 < time.monotonic() - began < 10.0


def test_an_answer_that_stops_half_way_times_out(stopped_worker: WorkerProcess) -> None:
    """Its beginning is there, so looking whether something came does not help."""
    near, far = socket.socketpair()
    with near:
        os.dup2(near.fileno(), stopped_worker._connection.fileno())  # the test takes the worker's place
    with far:
        far.sendall((1000).to_bytes(4, "big") + b"only the beginning")  # multiprocessing's frame: length, then content
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            stopped_worker.receive(0.5)
        assert 0.4 < time.monotonic() - began < 10.0


def test_a_timeout_of_one_message_does_not_shorten_the_next() -> None:
    worker = WorkerProcess(f"{TRL}:length_target")
    try:
        worker.wait_until_ready(60.0)
        with pytest.raises(TimeoutError):
            worker.receive(0.0)
        assert worker.exchange(b"no pickle", 30.0)  # answered with the error
    finally:
        worker.kill()
        worker.close()
