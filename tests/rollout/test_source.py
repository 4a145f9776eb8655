"""The rollout source: what it closes; its loop thread ends in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from grpo_async.records import GroupStatus
from grpo_async.rollout.source import RolloutSource
from tests.support.records import make_scored


async def _nothing() -> None: ...


def _source(**closing: Any) -> RolloutSource:
    """Whose worker does nothing."""
    worker, client, config = Mock(run=_nothing), Mock(aclose=AsyncMock()), Mock()
    worker.table.queued.return_value = []
    return RolloutSource(config, client=client, worker=worker, **closing)


def test_groups_that_are_queued_at_the_end_are_closed_unless_the_start_failed() -> None:
    for starts in (False, True):
        source, group = _source(), make_scored(0, has_samples=False)
        source._table.queued.return_value = [group]
        if starts:
            source.start()
        source.close()
        assert [call.args for call in source._worker.close_group.call_args_list] == (
            [(group.group, GroupStatus.FILTERED)] if starts else []
        )


@pytest.mark.parametrize("blocks", [False, True])
def test_close_ends_in_bounded_time_even_if_a_task_retries_for_ever_or_blocks_the_loop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    """R1.1."""
    monkeypatch.setattr("grpo_async.rollout.source._SHUTDOWN_TIMEOUT_S", 0.3)
    released, began = threading.Event(), threading.Event()

    async def stubborn() -> None:
        began.set()
        while not released.is_set():
            if blocks:
                released.wait(30.0)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    source = _source()
    source._worker.run = stubborn  # type: ignore[method-assign]
    source.start()
    assert began.wait(5.0)
    before = time.monotonic()
    source.close()
    assert time.monotonic() - before < 5.0
    assert "blocks the event loop" in caplog.text
    released.set()


def test_an_error_of_the_worker_reaches_the_buffer() -> None:
    async def fail() -> None:
        raise KeyError("inside")

    source, failed = _source(), threading.Event()
    source._worker.run = fail  # type: ignore[method-assign]
    source._buffer.fail.side_effect = lambda error: failed.set()  # type: ignore[attr-defined]
    source.start()
    assert failed.wait(5.0)
    (error,) = source._buffer.fail.call_args.args  # type: ignore[attr-defined]
    assert isinstance(error, KeyError)
    source.close()
