"""Calls of users' functions as values; what tools, environments and rewards share."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_async.user_code.calls import Raised, UserCall
from grpo_async.user_code.threads import ThreadRunner, ThreadsExhaustedError
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("error", "summary"), [(SystemExit(3), "SystemExit: 3"), (ValueError("two\n  lines"), "ValueError: two lines")]
)
def test_what_is_raised_is_a_value_with_one_line(error: BaseException, summary: str) -> None:
    def fails() -> None:
        raise error

    async def fails_later() -> None:
        raise error

    for raised in (UserCall(fails).attempt(), asyncio.run(UserCall(fails_later).attempt_async())):
        assert isinstance(raised, Raised)
        assert (raised.error, raised.summary) == (error, summary)


def test_a_cancelled_error_of_the_functions_own_is_a_value_and_one_of_the_caller_is_not() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    async def waits(started: asyncio.Event) -> None:
        started.set()
        await asyncio.Event().wait()

    async def run() -> None:
        own = await UserCall(gives_up).attempt_async()
        assert isinstance(own, Raised)
        started = asyncio.Event()
        task: asyncio.Task[Any] = asyncio.create_task(UserCall(waits, live={"started": started}).attempt_async())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


# -- ThreadRunner: what counts against its limits, and when.


LONG_S = 60.0


class Gate:
    """Work that runs until `open` is set, and counts how often it runs."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.num_running = 0
        self._lock = threading.Lock()

    def wait(self) -> str:
        self._add(1)
        assert self.open.wait(LONG_S)
        self._add(-1)
        return "done"

    def _add(self, change: int) -> None:
        with self._lock:
            self.num_running += change


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


async def cancelled(runner: ThreadRunner, gate: Gate, *, timeout_s: float) -> None:
    """Start a call and cancel its caller when it runs."""
    running = gate.num_running
    task = asyncio.create_task(runner.run(gate.wait, timeout_s))
    await until(lambda: gate.num_running == running + 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_callers_thread_counts_only_once_it_outlives_the_limit(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        runner = ThreadRunner("gated", max_threads=2)
        await cancelled(runner, gate, timeout_s=1.0)
        await cancelled(runner, gate, timeout_s=LONG_S)
        await until(lambda: runner.num_abandoned == 1)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await runner.run(gate.wait, 0.05)
        assert runner.num_abandoned == 4
        with pytest.raises(ThreadsExhaustedError, match="gated: 4 of its threads still run past their time limit"):
            await runner.run(gate.wait, LONG_S)
        gate.open.set()
        await until(lambda: runner.num_abandoned == 0)
        assert await runner.run(gate.wait, LONG_S) == "done"

    asyncio.run(run())
    gc.collect()
    assert "never retrieved" not in caplog.text
