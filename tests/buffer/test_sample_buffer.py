"""The queue between rollout thread and trainer."""

from __future__ import annotations

import threading
import time

import pytest

from grpo_async.buffer.group_table import GroupTable
from grpo_async.buffer.sample_buffer import SampleBuffer, Watch
from grpo_async.errors import DeadlineError, RunError
from grpo_async.records import GroupStatus, ScoredGroup
from tests.support.records import make_scored


class _Fixture:
    def __init__(self) -> None:
        self.dropped: list[tuple[int, str, int | None]] = []  # group id, status, step
        self.table = GroupTable(groups_per_step=2, max_staleness=1, version=0, last_version=3)
        self.buffer = SampleBuffer(self.table, on_drop=self._drop, last_step=3)

    def _drop(self, scored: ScoredGroup, status: GroupStatus, step: int | None) -> None:
        self.table.close(scored.group_id, status)
        self.dropped.append((scored.group_id, status, step))

    def add(self, *groups: ScoredGroup) -> None:
        for scored in groups:
            self.table.restore(scored)

    def take(self, count: int, *, version: int = 0, timeout_s: float = 0.2, progress: int = 0) -> list[int]:
        watch = Watch(timeout_s=timeout_s, progress=lambda: progress)
        taken = self.buffer.take(count, trainer_version=version, watch=watch)
        assert taken is not None
        return [scored.group.group_id for scored in taken]


@pytest.mark.parametrize(
    ("late_version", "taken"),
    [
        pytest.param(1, [2, 4], id="a late group that the step after can use waits for it"),
        pytest.param(0, [1, 2], id="one that would be too stale for the step after comes first"),
    ],
)
def test_what_is_reserved_stays_queued_and_is_taken_next(late_version: int, taken: list[int]) -> None:
    """At version 1, with max_staleness 1: what was sampled at version 0 is of no use after this step, group 0 is of none now."""
    fixture = _Fixture()
    fixture.add(make_scored(0, version=-1), make_scored(2, version=1), make_scored(4, version=1))
    assert fixture.buffer.reserve(3, trainer_version=1) == []  # too few
    reserved = fixture.buffer.reserve(2, trainer_version=1)
    assert [scored.group.group_id for scored in reserved] == [2, 4]
    assert len(fixture.table.queued()) == 3
    fixture.add(make_scored(1, version=late_version))
    assert fixture.take(2, version=1) == taken
    assert fixture.take(1, version=1) == [7 - sum(taken)]


def test_a_round_without_any_samples_is_given_back_and_the_next_one_taken() -> None:
    fixture = _Fixture()
    fixture.add(make_scored(0, has_samples=False), make_scored(1, has_samples=False), make_scored(2), make_scored(3))
    assert fixture.take(2) == [2, 3]
    assert fixture.dropped == [(0, "filtered", 1), (1, "filtered", 1)]
    assert [scored.group.group_id for scored in fixture.buffer.take_dropped()] == [0, 1]


def test_what_was_taken_before_a_failure_is_queued_again_for_the_checkpoint_that_is_written_then() -> None:
    fixture = _Fixture()
    fixture.add(make_scored(1), make_scored(0))
    with pytest.raises(DeadlineError, match=r"samples for step 1; .* raise `training.queue_timeout_s`"):
        fixture.take(3, timeout_s=0.05)
    assert [scored.group.group_id for scored in fixture.table.queued()] == [0, 1]


@pytest.mark.parametrize("what", ["add", "fail", "interrupt", "end", "wake"])
def test_a_waiting_take_is_woken_and_does_not_wait_for_its_next_check(what: str) -> None:
    """R1.4: the next check would be in 20 s. An empty queue goes on waiting, but not after generation died."""
    fixture = _Fixture()
    buffer = fixture.buffer
    actions = {
        "end": buffer.end,
        "add": lambda: fixture.add(make_scored()),
        "fail": lambda: buffer.fail(RunError("generation died")),
        "interrupt": buffer.interrupt,
        "wake": buffer.wake,
    }
    timer = threading.Timer(0.2, actions[what])
    timer.start()
    began = time.monotonic()
    watch = Watch(timeout_s=60.0, progress=lambda: 0)
    if what == "fail":
        with pytest.raises(RunError):
            buffer.take(1, trainer_version=0, watch=watch)
    else:
        taken = buffer.take(1, trainer_version=0, watch=watch)
        assert taken is None if what in ("interrupt", "wake") else len(taken or ()) == (what == "add")
    assert time.monotonic() - began < 5.0
    timer.join()


def test_after_the_end_of_the_data_what_is_left_is_a_smaller_round_and_then_there_is_none() -> None:
    """What cannot be trained is closed; of the last round no step will see it."""
    fixture = _Fixture()
    fixture.add(make_scored(0), make_scored(1), make_scored(2), make_scored(3, has_samples=False))
    fixture.add(make_scored(4, version=-5))
    fixture.buffer.end()
    for taken in ([0, 1], [2, 3], []):
        assert fixture.take(2) == taken
        fixture.buffer.take_dropped()
    assert fixture.dropped == [(4, "stale", None)]
    assert fixture.take(2) == []
