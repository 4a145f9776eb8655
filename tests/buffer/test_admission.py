"""Admission paces generation by what training can still use."""

from __future__ import annotations

import asyncio

import pytest

from grpo_async.buffer.admission import Admission


def _admission(**changes: int) -> Admission:
    settings = {"groups_per_step": 4, "max_staleness": 1, "version": 0, "last_version": 100, **changes}
    return Admission(**settings)


async def _admit(admission: Admission, count: int) -> None:
    for _ in range(count):
        await asyncio.wait_for(admission.admit(), timeout=1.0)


@pytest.mark.parametrize(
    ("changes", "capacity"),
    [
        ({}, 8),  # (0 + 1 + 1) x 4
        ({"max_staleness": 0}, 4),
        ({"max_staleness": 5, "last_version": 2}, 8),  # 2 steps x 4, not 6 x 4: no step could consume more
        ({"version": 10}, 8),  # a resumed run counts from its own version
    ],
)
def test_so_many_are_admitted_as_the_steps_within_the_staleness_consume(changes: dict[str, int], capacity: int) -> None:
    async def run() -> None:
        admission = _admission(**changes)
        await _admit(admission, capacity)
        assert admission.capacity == 0

    asyncio.run(run())


def test_a_waiting_admit_is_woken_by_release_and_by_a_new_version() -> None:
    async def run() -> None:
        admission = _admission()
        await _admit(admission, 8)
        waiting = asyncio.create_task(admission.admit())
        await asyncio.sleep(0)
        assert not waiting.done()
        admission.release()
        await asyncio.wait_for(waiting, timeout=1.0)
        waiting = asyncio.create_task(admission.admit())
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(admission.advance, 1)  # from another thread, as the trainer does
        await asyncio.wait_for(waiting, timeout=1.0)
        assert admission.capacity == 3  # one step more is 4 groups, one of them admitted above

    asyncio.run(run())
