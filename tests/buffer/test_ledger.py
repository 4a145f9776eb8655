"""Nothing disappears unaccounted."""

from __future__ import annotations

import pytest

from grpo_async.buffer.ledger import Ledger, is_closed, totals_for_resume
from grpo_async.records import GroupStatus


def test_the_ledger_is_closed_at_every_moment() -> None:
    ledger = Ledger()
    for group_id in range(4):
        ledger.start(group_id)
        ledger.generated(group_id, 10)
        assert is_closed(ledger.snapshot())
    ledger.drop_tokens(0, 4)
    ledger.queue(0)
    assert is_closed(ledger.snapshot())
    ledger.close_group(0, GroupStatus.TRAINED)
    ledger.close_group(1, GroupStatus.STALE)
    ledger.close_group(2, GroupStatus.FILTERED)
    snapshot = ledger.snapshot()
    assert is_closed(snapshot)
    assert snapshot["groups"] == {
        "started": 4, "trained": 1, "filtered": 1, "stale": 1, "failed": 0, "cancelled": 0, "queued": 0, "in_flight": 1,
    }  # fmt: skip
    assert snapshot["tokens"]["trained"] == 6  # 10 - 4 of the failed rollout
    assert snapshot["tokens"]["failed"] == 4
    assert snapshot["tokens"]["in_flight"] == 10
    snapshot["groups"]["in_flight"] = 0
    assert not is_closed(snapshot)


def test_a_group_is_closed_only_once_and_only_finally() -> None:
    ledger = Ledger()
    ledger.start(1)
    with pytest.raises(ValueError, match="not a final status"):
        ledger.close_group(1, GroupStatus.QUEUED)
    ledger.close_group(1, GroupStatus.FAILED)
    with pytest.raises(KeyError):
        ledger.close_group(1, GroupStatus.TRAINED)


def test_totals_for_resume_leave_out_what_is_open_so_that_it_counts_once() -> None:
    ledger = Ledger()
    for group_id in range(3):
        ledger.start(group_id)
        ledger.generated(group_id, 7)
    ledger.close_group(0, GroupStatus.TRAINED)
    ledger.queue(1)
    resumed = Ledger(totals_for_resume(ledger.snapshot()))
    assert is_closed(resumed.snapshot())
    assert resumed.snapshot()["groups"] == {
        **{status: 0 for status in GroupStatus if status is not GroupStatus.EVALUATED},
        "started": 1,
        "trained": 1,
    }
    assert resumed.snapshot()["tokens"]["started"] == 7
    assert ledger.tokens_of(1) == 7
    assert ledger.tokens_of(0) == 0  # closed


def test_events_grow_with_everything_that_moves_but_tokens_of_a_closed_group_are_not_counted() -> None:
    """What a waiting trainer takes as a sign of life: a group that starts, tokens that arrive, a group that is closed."""
    ledger = Ledger()
    seen = [ledger.num_events]
    for move in (
        lambda: ledger.start(1),
        lambda: ledger.generated(1, 5),
        lambda: ledger.close_group(1, GroupStatus.FAILED),
    ):
        move()
        seen.append(ledger.num_events)
    assert seen == sorted(set(seen))
    ledger.generated(1, 5)
    assert ledger.num_events == seen[-1]
    assert ledger.snapshot()["tokens"]["started"] == 5
    assert is_closed(ledger.snapshot())
