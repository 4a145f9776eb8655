"""Nothing disappears unaccounted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from grpo_async.buffer.group import GroupState
from grpo_async.buffer.group_table import GroupTable
from grpo_async.buffer.ledger import is_balanced
from grpo_async.records import GroupStatus
from tests.support.records import make_scored, start_group


def _table(totals: Mapping[str, Mapping[str, int]] | None = None, **changes: int) -> GroupTable:
    return GroupTable(
        totals, **{"groups_per_step": 4, "max_staleness": 1, "version": 0, "last_version": 100, **changes}
    )


def test_the_ledger_is_balanced_at_every_moment() -> None:
    table = _table()
    for group_id in range(4):
        start_group(table, group_id)
        table.generated(group_id, 10)
        assert is_balanced(table.ledger())
    table.drop_tokens(0, 4)
    table.score(make_scored(0))
    assert is_balanced(table.ledger())
    table.close(0, GroupStatus.TRAINED)
    table.close(1, GroupStatus.STALE)
    table.close(2, GroupStatus.FILTERED)
    table.generated(2, 5)  # too late to be counted
    snapshot = table.ledger()
    assert is_balanced(snapshot)
    assert snapshot["groups"] == {
        "started": 4, "trained": 1, "filtered": 1, "stale": 1, "failed": 0, "cancelled": 0, "queued": 0, "in_flight": 1,
    }  # fmt: skip
    assert snapshot["tokens"]["trained"] == 6  # 10 - 4 of the failed rollout
    assert snapshot["tokens"]["failed"] == 4
    assert snapshot["tokens"]["in_flight"] == 10
    snapshot["groups"]["in_flight"] = 0
    assert not is_balanced(snapshot)


# ---- admission: generation is paced by what training can still use ----


async def _start(table: GroupTable, *group_ids: int) -> None:
    for group_id in group_ids:
        async with asyncio.timeout(1.0):
            await table.admit()
        start_group(table, group_id)


@pytest.mark.parametrize(
    ("changes", "capacity"),
    [
        ({}, 8),  # (0 + 1 + 1) x 4
        ({"max_staleness": 0}, 4),
        ({"max_staleness": 5, "last_version": 2}, 8),  # 2 steps x 4, not 6 x 4: no step could consume more
        ({"version": 10}, 8),  # a resumed run counts from its own version
    ],
)
def test_as_many_are_admitted_as_the_steps_within_the_staleness_consume(changes: dict[str, int], capacity: int) -> None:
    table = _table(**changes)
    asyncio.run(_start(table, *range(capacity)))
    assert table.capacity == 0


def test_a_waiting_admit_is_woken_by_a_group_that_no_step_takes_and_by_a_new_version() -> None:
    """R1.3: back-pressure is an awaited admission."""

    async def run() -> None:
        table = _table()
        await _start(table, *range(8))
        waiting = asyncio.create_task(_start(table, 8))
        await asyncio.sleep(0)
        table.score(make_scored(0))
        table.mark(table.queued(), GroupState.TAKEN)
        table.close(0, GroupStatus.TRAINED)  # its place is the next version's
        await asyncio.sleep(0)
        assert not waiting.done()
        table.close(1, GroupStatus.FAILED)
        await asyncio.wait_for(waiting, timeout=1.0)
        waiting = asyncio.create_task(_start(table, 9))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(table.advance, 1)  # from another thread, as the trainer does
        await asyncio.wait_for(waiting, timeout=1.0)
        assert table.capacity == 3  # one step more is 4 groups, one of them admitted above

    asyncio.run(run())
