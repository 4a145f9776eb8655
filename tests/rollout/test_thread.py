"""The loop thread ends in bounded time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from grpo_async.errors import DeadlineError
from grpo_async.rollout.thread import LoopThread


def test_stop_ends_in_bounded_time_even_if_a_task_retries_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """R1.1."""

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    thread = LoopThread()
    thread.start()
    thread.spawn(stubborn(), on_error=lambda error: None)
    began = time.monotonic()
    thread.stop(timeout_s=0.3)
    assert time.monotonic() - began < 3.0
    assert "rollout.shutdown_timeout_s" in caplog.text


def test_stop_ends_in_bounded_time_even_if_something_blocks_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    async def block() -> None:
        released.wait(30.0)

    thread = LoopThread()
    thread.start()
    thread.spawn(block(), on_error=lambda error: None)
    began = time.monotonic()
    thread.stop(timeout_s=0.3)
    assert time.monotonic() - began < 5.0
    assert "blocks the event loop" in caplog.text
    released.set()


def test_call_returns_results_errors_and_deadlines() -> None:
    async def give(value: int) -> int:
        return value

    async def fail() -> None:
        raise KeyError("inside")

    thread = LoopThread()
    thread.start()
    assert thread.call(give(3), timeout_s=5.0, what="x", setting="y") == 3
    with pytest.raises(KeyError, match="inside"):
        thread.call(fail(), timeout_s=5.0, what="x", setting="y")
    with pytest.raises(DeadlineError, match=r"waited 0 s for a nap; raise `a\.b`"):
        thread.call(asyncio.sleep(60), timeout_s=0.05, what="a nap", setting="a.b")
    thread.stop(timeout_s=5.0)


def test_a_background_error_reaches_the_handler() -> None:
    async def fail() -> None:
        raise KeyError("inside")

    errors: list[BaseException] = []
    seen = threading.Event()

    def on_error(error: BaseException) -> None:
        errors.append(error)
        seen.set()

    thread = LoopThread()
    thread.start()
    thread.spawn(fail(), on_error=on_error)
    assert seen.wait(5.0)
    assert isinstance(errors[0], KeyError)
    thread.stop(timeout_s=5.0)
