"""ThreadRunner: what counts against its limits, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from grpo_async.user_code.threads import ThreadRunner, ThreadsExhaustedError
from tests.support.waiting import until

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


def test_a_cancelled_caller_is_no_abandoned_thread_before_the_limit_of_its_call(gate: Gate) -> None:
    async def run() -> str:
        runner = ThreadRunner("gated", max_threads=8, max_abandoned=1)
        for _ in range(3):
            await cancelled(runner, gate, timeout_s=LONG_S)
        assert runner.num_abandoned == 0
        later = asyncio.create_task(runner.run(gate.wait, LONG_S))
        await until(lambda: gate.num_running == 4)  # not refused
        gate.open.set()
        return await later

    assert asyncio.run(run()) == "done"


def test_a_cancelled_callers_thread_counts_once_it_outlives_the_limit(gate: Gate) -> None:
    async def run() -> None:
        runner = ThreadRunner("gated", max_abandoned=2)
        await cancelled(runner, gate, timeout_s=1.0)
        await cancelled(runner, gate, timeout_s=LONG_S)
        await until(lambda: runner.num_abandoned == 1)
        with pytest.raises(TimeoutError):
            await runner.run(gate.wait, 0.05)
        assert runner.num_abandoned == 2
        with pytest.raises(ThreadsExhaustedError, match="gated: 2 of its threads still run past their time limit"):
            await runner.run(gate.wait, LONG_S)
        gate.open.set()
        await until(lambda: runner.num_abandoned == 0)
        assert await runner.run(gate.wait, LONG_S) == "done"

    asyncio.run(run())


def test_a_cancelled_callers_thread_gives_its_place_up_at_the_limit_of_its_call(gate: Gate) -> None:
    async def run() -> None:
        runner = ThreadRunner("gated", max_threads=1, max_abandoned=2)
        await cancelled(runner, gate, timeout_s=1.0)
        started = time.monotonic()
        assert await asyncio.wait_for(runner.run(lambda: "next", LONG_S), 20) == "next"
        assert runner.num_abandoned == 1  # the hanging thread counts from the moment its place is free
        assert time.monotonic() - started < LONG_S / 2
        gate.open.set()
        await until(lambda: runner.num_abandoned == 0)
        # Its end gives no second place back: one call runs, the other waits.
        again = Gate()
        both = [asyncio.create_task(runner.run(again.wait, LONG_S)) for _ in range(2)]
        await until(lambda: again.num_running == 1)
        await asyncio.sleep(0.1)
        assert again.num_running == 1
        again.open.set()
        assert await asyncio.gather(*both) == ["done", "done"]

    asyncio.run(run())
