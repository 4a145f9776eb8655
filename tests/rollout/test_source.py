"""The rollout source: what it closes; its loop thread ends in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from grpo_async.errors import DeadlineError
from grpo_async.records import GroupStatus
from grpo_async.rollout.source import RolloutSource
from grpo_async.rollout.thread import LoopThread
from tests.support.records import make_scored


async def _nothing() -> None: ...


def _source(**closing: Any) -> RolloutSource:
    """Whose worker does nothing."""
    worker, client, config = Mock(run=_nothing), Mock(aclose=AsyncMock()), Mock()
    worker.buffer.drain.return_value = []
    return RolloutSource(config, client=client, worker=worker, **closing)


def test_groups_that_are_queued_at_the_end_are_closed_unless_the_start_failed() -> None:
    for starts in (False, True):
        source, group = _source(), make_scored(0, has_samples=False)
        source._buffer.drain.return_value = [group]
        if starts:
            source.start()
        source.close()
        assert [call.args for call in source._worker.close_group.call_args_list] == (
            [(group.group, GroupStatus.FILTERED)] if starts else []
        )


def test_what_cannot_be_closed_keeps_no_other_part_from_being_closed() -> None:
    async def close() -> None:
        raise KeyError("a connection")

    closed: list[str] = []
    source = _source(closing_on_loop=[close], closing=[lambda: closed.append("workers")])
    source.close()
    source._closing_on_loop[-1].assert_awaited_once()  # type: ignore[attr-defined]
    assert closed == ["workers"]
    assert not source._thread._thread.is_alive()


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    thread.start()
    yield thread
    thread.stop(timeout_s=5.0)


@pytest.mark.parametrize("blocks", [False, True])
def test_stop_ends_in_bounded_time_even_if_a_task_retries_for_ever_or_blocks_the_loop(
    caplog: pytest.LogCaptureFixture, blocks: bool
) -> None:
    """R1.1."""
    released = threading.Event()

    async def stubborn() -> None:
        while not released.is_set():
            if blocks:
                released.wait(30.0)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    thread = LoopThread()
    thread.start()
    thread.spawn(stubborn(), on_error=lambda error: None)
    began = time.monotonic()
    thread.stop(timeout_s=0.3)
    assert time.monotonic() - began < 5.0
    assert "blocks the event loop" in caplog.text
    released.set()


def test_call_returns_results_errors_and_deadlines(thread: LoopThread) -> None:
    async def give(value: int) -> int:
        return value

    async def fail() -> None:
        raise KeyError("inside")

    assert thread.call(give(3), timeout_s=5.0, what="x", setting="y") == 3
    with pytest.raises(KeyError, match="inside"):
        thread.call(fail(), timeout_s=5.0, what="x", setting="y")
    with pytest.raises(DeadlineError, match=r"waited 0 s for a nap; raise `a\.b`"):
        thread.call(asyncio.sleep(60), timeout_s=0.05, what="a nap", setting="a.b")
    errors: list[BaseException] = []
    seen = threading.Event()
    thread.spawn(fail(), on_error=lambda error: (errors.append(error), seen.set())[1])
    assert seen.wait(5.0)
    assert isinstance(errors[0], KeyError)
