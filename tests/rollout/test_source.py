"""What the rollout source changes in its process while it generates, and gives back."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

from grpo_async.records import GroupStatus
from grpo_async.rollout.source import RolloutSource
from grpo_async.rollout.thread import LoopThread
from tests.support.records import make_scored


async def _generates_nothing() -> None:
    """A worker's run."""


def _spawn(work: Coroutine[Any, Any, None], *, on_error: object) -> None:
    work.close()


def _source(thread: Any = None, **closing: Any) -> RolloutSource:
    """Without a thread of its own nothing runs."""
    thread = thread or Mock(spawn=_spawn, cancel_all=Mock(return_value=False))
    worker: Any = SimpleNamespace(run=_generates_nothing)
    config: Any = SimpleNamespace()
    parts: dict[str, Any] = {name: Mock() for name in ("client", "buffer", "ledger", "errors", "advantages")}
    parts["buffer"].drain.return_value = []
    parts["client"].aclose = AsyncMock()
    return RolloutSource(config, thread=thread, worker=worker, **parts, **closing)


def test_groups_that_are_queued_at_the_end_are_closed_unless_the_start_failed() -> None:
    for starts in (False, True):
        source, group = _source(), make_scored(0, has_samples=False)
        source._buffer.drain.return_value = [group]
        source._worker.close_group = Mock()
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
    thread = LoopThread()
    thread.start()
    source = _source(thread, closing_on_loop=[close], closing=[lambda: closed.append("workers")])
    source.close()
    source._client.aclose.assert_awaited_once()  # type: ignore[attr-defined]
    assert closed == ["workers"]
    assert not thread._thread.is_alive()
