"""Whose place a step keeps, on a simulated clock: generation happens while `take` waits, in one thread, in whole seconds."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from grpo_async.buffer.group_table import GroupTable
from grpo_async.buffer.ledger import is_balanced
from grpo_async.buffer.sample_buffer import SampleBuffer, Watch
from grpo_async.records import GroupStatus, ScoredGroup
from tests.support.records import make_scored, start_group


@dataclass(frozen=True)
class Plan:
    """What becomes of a group: the seconds from its start to its first token, and from there to its end; how it ends."""

    takes: int = 1
    begins: int = 0
    ends: GroupStatus = GroupStatus.QUEUED  # or FAILED, FILTERED


@dataclass
class _Making:
    plan: Plan
    started: float
    version: int | None = None  # of the first token
    sampled: float = 0.0


class Simulation:
    """A run of `steps` steps. `plan` gives the plan of a group by its id; between the seconds of `down` nothing is generated."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, plan: Callable[[int], Plan], *, groups: int = 4, max_staleness: int = 1,
        sync_steps: int = 1, steps: int = 12, train_s: int = 1, down: tuple[int, int] = (0, 0), timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.patience_s = min(30.0, timeout_s)
        self.plan, self.groups, self.max_staleness, self.sync_steps = plan, groups, max_staleness, sync_steps
        self.steps, self.train_s, self.down, self.timeout_s = steps, train_s, down, timeout_s
        self.table = GroupTable(groups_per_step=groups, max_staleness=max_staleness, version=0, last_version=steps)
        self.buffer = SampleBuffer(self.table, on_drop=self._drop, last_step=steps)
        self.making: dict[int, _Making] = {}
        self.ids = itertools.count()
        self.version = 0  # served
        self.taken: list[list[int]] = []  # [steps][groups]
        self.waited_s: list[float] = []  # [steps]
        self.stale: dict[int, _Making] = {}
        self.took_from: list[float] = []

    def run(self) -> None:
        self._generate()
        for version in range(self.steps):
            began = self.now
            watch = Watch(timeout_s=self.timeout_s, progress=lambda: self.table.num_events)
            while (taken := self.buffer.take(self.groups, trainer_version=version, watch=watch, wait_s=0.0)) is None:
                self._tick()
            self.buffer.take_dropped()
            self.taken.append([scored.group_id for scored in taken])
            self.waited_s.append(self.now - began)
            self.took_from.append(self.now)
            for scored in taken:
                assert scored.oldest_version is None or version - scored.oldest_version <= self.max_staleness
            for _ in range(self.train_s):
                self._tick()
                self.buffer.reserve(self.groups, trainer_version=version + 1)
            for scored in taken:
                status = GroupStatus.TRAINED if scored.samples else GroupStatus.FILTERED
                self.table.close(scored.group_id, status)
            if (version + 1) % self.sync_steps == 0:
                self._push(version + 1)
            assert is_balanced(self.table.ledger())
        self._check_stale()

    def _tick(self) -> None:
        self.now += 1.0
        if not self.down[0] <= self.now - 1000.0 < self.down[1]:
            self._generate()

    def _generate(self) -> None:
        while self.table.capacity > 0:
            group_id = next(self.ids)
            start_group(self.table, group_id)
            self.making[group_id] = _Making(self.plan(group_id), self.now)
        assert len(self.making) + len(self.table.queued()) <= (self.max_staleness + 1) * self.groups
        for group_id, made in list(self.making.items()):
            if made.version is None and self.now >= made.started + made.plan.begins:
                made.version, made.sampled = self.version, self.now
                self.table.generated(group_id, 1, self.version)
            if made.version is not None and self.now >= made.sampled + made.plan.takes:
                del self.making[group_id]
                self._end(group_id, made)

    def _end(self, group_id: int, made: _Making) -> None:
        assert made.version is not None
        if made.plan.ends is GroupStatus.QUEUED:
            self.table.score(make_scored(group_id, version=made.version))
        else:
            self.table.close(group_id, made.plan.ends)

    def _push(self, version: int) -> None:
        self.version = version
        self.table.advance(version)
        for group_id in list(self.making):
            if self.table.will_be_stale(group_id):
                self.table.close(group_id, GroupStatus.STALE)
                self.stale[group_id] = self.making.pop(group_id)
        self._generate()

    def _drop(self, scored: ScoredGroup, status: GroupStatus, step: int | None) -> None:
        self.table.close(scored.group_id, status)
        if status is GroupStatus.STALE:
            assert scored.oldest_version is not None
            self.stale[scored.group_id] = _Making(self.plan(scored.group_id), self.now, scored.oldest_version, 0.0)

    def _check_stale(self) -> None:
        """No group is stale that was begun when its last step took a younger one in its place, unless a step had waited for it."""
        for group_id, made in self.stale.items():
            assert made.version is not None
            last = made.version + self.max_staleness
            took_younger = max(self.taken[last]) > group_id
            was_begun = made.sampled < self.took_from[last]
            waits = self.waited_s[made.version : last + 1]
            assert not (took_younger and was_begun) or max(waits) >= self.patience_s, (group_id, made, self.taken)


def _slow(ids: set[int], plan: Plan) -> Callable[[int], Plan]:
    return lambda group_id: plan if group_id in ids else Plan()


def test_a_slow_group_gets_the_place_of_a_younger_one_that_is_ready_in_the_last_step_that_may_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Group 10 is sampled by version 1, so step 3 is the last; 12 to 15 of version 2 are ready long before it."""
    run = Simulation(monkeypatch, _slow({10}, Plan(takes=20)))
    run.run()
    assert run.taken[2] == [8, 9, 10, 11]
    assert not run.stale


def test_the_first_steps_take_what_was_started_first_not_what_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even ids are slow. All of the first eight are of version 0, so none of them would be lost."""
    run = Simulation(monkeypatch, lambda group_id: Plan(takes=1 + 9 * (group_id % 2 == 0)))
    run.run()
    assert run.taken == [list(range(4 * step, 4 * step + 4)) for step in range(12)]


@pytest.mark.parametrize(
    ("takes", "timeout_s", "waited_s"),
    [
        pytest.param({}, 600.0, 30.0, id="30 s at least"),
        pytest.param(dict.fromkeys(range(8), 50), 600.0, 50.0, id="as long as the slowest of the recent groups took"),
        pytest.param({}, 12.0, 12.0, id="less where nothing moves for training.queue_timeout_s"),
    ],
)
def test_no_step_waits_for_ever_and_none_waits_for_that_group_again(
    monkeypatch: pytest.MonkeyPatch, takes: dict[int, int], timeout_s: float, waited_s: float
) -> None:
    """Group 10 hangs. It is not waited for in step 3, when it is due, for longer than that; it is stale then."""
    run = Simulation(
        monkeypatch,
        lambda group_id: Plan(takes=10_000 if group_id == 10 else takes.get(group_id, 1)),
        timeout_s=timeout_s,
    )
    run.run()
    assert run.waited_s[2] == pytest.approx(waited_s, abs=3.0)
    assert max(run.waited_s[3:]) <= 3.0
    assert set(run.stale) == {10}


def test_what_lost_its_place_to_the_order_is_waited_for_again_in_the_last_step_that_may_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 1 waits 30 s for its groups 0 and 1, step 2 is the last that may use them."""
    plans = {0: Plan(takes=45), 1: Plan(takes=50)}
    run = Simulation(monkeypatch, lambda group_id: plans.get(group_id, Plan()), groups=2)
    run.run()
    assert run.taken[:3] == [[2, 3], [0, 1], [4, 5]]


def _random_plan(seed: int) -> Callable[[int], Plan]:
    def plan(group_id: int) -> Plan:
        draw = random.Random(f"{seed}/{group_id}")
        ends = draw.choices([GroupStatus.QUEUED, GroupStatus.FAILED, GroupStatus.FILTERED], [8, 1, 1])[0]
        takes = draw.choice([1, 1, 2, 5, 25]) if draw.random() < 0.97 else 200
        return Plan(takes=takes, begins=draw.choice([0, 0, 0, 3, 12]), ends=ends)

    return plan


@pytest.mark.parametrize(("max_staleness", "sync_steps"), [(0, 1), (1, 1), (1, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_every_step_is_filled_and_nobody_is_stale_in_place_of_a_younger_group(
    monkeypatch: pytest.MonkeyPatch, max_staleness: int, sync_steps: int, seed: int
) -> None:
    """Slow rewards, slow environments, groups that fail, servers that restart at second 20. `Simulation` checks the bound on the
    staleness, the ledger, the admission and what becomes of stale groups."""
    down = (20, 60) if seed % 2 else (0, 0)
    run = Simulation(
        monkeypatch, _random_plan(seed), max_staleness=max_staleness, sync_steps=sync_steps, down=down,
        groups=1 + seed % 4, steps=16, train_s=1 + seed % 3,
    )  # fmt: skip
    run.run()
    assert [len(ids) for ids in run.taken] == [run.groups] * run.steps
