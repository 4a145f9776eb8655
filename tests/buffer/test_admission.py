"""Admission paces generation by what training can still use."""

from __future__ import annotations

import asyncio

from grpo_async.buffer.admission import Admission


def _admission(**changes: int) -> Admission:
    settings = {"groups_per_step": 4, "max_staleness": 1, "version": 0, "last_version": 100, **changes}
    return Admission(**settings)


async def _admit(admission: Admission, count: int) -> None:
    for _ in range(count):
        await asyncio.wait_for(admission.admit(), timeout=1.0)


def test_capacity_is_staleness_plus_one_steps() -> None:
    async def run() -> None:
        admission = _admission()
        assert admission.capacity == 8  # (0 + 1 + 1) x 4
        await _admit(admission, 8)
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


def test_staleness_zero_admits_one_step_at_a_time() -> None:
    async def run() -> None:
        admission = _admission(max_staleness=0)
        await _admit(admission, 4)
        assert admission.capacity == 0
        admission.advance(1)
        assert admission.capacity == 4

    asyncio.run(run())


def test_nothing_is_admitted_that_no_step_could_consume() -> None:
    admission = _admission(max_staleness=5, last_version=2)
    assert admission.capacity == 8  # 2 steps x 4, not 6 x 4


def test_a_resumed_run_counts_from_its_own_version() -> None:
    admission = _admission(version=10)
    assert admission.capacity == 8
