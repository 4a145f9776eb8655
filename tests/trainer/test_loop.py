"""The main loop and the servers: a step goes on without them, and they get the weights when they are back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from grpo_async.errors import RunError, WeightPushError
from grpo_async.records import ScoredGroup
from grpo_async.trainer.saving import Saver
from grpo_async.training.ranks import Command
from grpo_async.weights.push import GatherCommand
from tests.support.records import make_scored
from tests.trainer.fakes import NO_EVALUATIONS, FakeSource, FakeSync, fake_context, loop_config, make_trainer


class _Source(FakeSource):
    """Hands out one group per step; `before[n]` is what happens while the n-th step waits, which it wakes."""

    def __init__(self, before: dict[int, Callable[[], None]]) -> None:
        self.before = before
        self.versions: list[int] = []
        self.num_taken = 0

    def take(self, num_groups: int, **_: Any) -> list[ScoredGroup] | None:
        if (change := self.before.pop(self.num_taken + 1, None)) is not None:
            change()
            return None
        self.num_taken += 1
        return [make_scored(self.num_taken)]

    def advance(self, version: int) -> None:
        self.versions.append(version)


def _run(
    sync: FakeSync,
    source: _Source,
    *,
    steps: int,
    sync_steps: int = 1,
    evaluations: Any = NO_EVALUATIONS,
    lines: list[dict[str, float]] | None = None,
) -> tuple[list[dict[str, float]], list[Command]]:
    context = fake_context(loop_config(training={"max_steps": steps, "weight_sync_steps": sync_steps}))
    lines = [] if lines is None else lines
    trainer = make_trainer(context, source, lines, sync=sync, evaluations=evaluations)
    evaluations.hold = trainer.publisher.hold
    trainer.train()
    return lines, context.channel.of_first


def test_a_server_that_is_back_while_the_trainer_waits_gets_the_weights_of_the_last_step_at_once() -> None:
    sync = FakeSync(up=False)

    def comes_back() -> None:
        sync.up = sync.fleet.has_ready = True

    source = _Source({3: comes_back})
    lines, commands = _run(sync, source, steps=3)
    assert sync.events == ["sleep", "skip 1", "sleep", "skip 2", "push 2", "sleep", "push 3"]
    assert source.versions == [2, 3]
    assert "sync/skipped" not in lines[2]
    assert sum(isinstance(command, GatherCommand) for command in commands) == 2


def test_a_server_that_joins_between_two_pushes_gets_the_newest_weights_not_the_last_pushed() -> None:
    """Pushes every second step: at step 3 the trainer's weights are version 3, the servers' version 2."""
    sync = FakeSync()

    def joins() -> None:
        sync.fleet.has_ready = True

    source = _Source({4: joins})
    _run(sync, source, steps=4, sync_steps=2)
    assert sync.pushed == [2, 3, 4]
    assert source.versions == [2, 3, 4]


@pytest.mark.parametrize("fails", ["push", "verify"])
def test_a_push_or_verification_that_ends_the_run_leaves_the_step_saved_and_its_line_written_before(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    saved: list[tuple[int, int]] = []
    lines: list[dict[str, float]] = []

    class Failing(FakeSync):
        def push(self, version: int, *, send_to_ranks: Callable[[GatherCommand], None]) -> dict[str, float] | None:
            if version == 2 and fails == "push":
                raise WeightPushError("it was refused")
            return super().push(version, send_to_ranks=send_to_ranks)

        def verify(self, score: Any, *, is_proof: bool = False) -> dict[str, float]:
            if self.pushed == [1, 2] and fails == "verify":
                raise RunError("it was refused")
            return {}

    monkeypatch.setattr(Saver, "save", lambda self, step, wait: saved.append((step, len(lines))))
    with pytest.raises(RunError, match="it was refused"):
        _run(Failing(), _Source({}), steps=3, lines=lines)
    assert saved == [(2, 2)]  # else the resumed run has no line of step 2
    assert "step_time" in lines[1]  # a whole one


class _Evaluations:
    """Holds pushes from the end of step `begins` on, until `ends` is called."""

    is_over, num_tokens = True, 0
    hold: Callable[[Future[None]], None]

    def __init__(self, begins: int) -> None:
        self._running: Future[None] = Future()
        self._begins = begins

    def after_step(self, step: int, metrics: dict[str, float], *, is_served: bool) -> None:
        if step == self._begins:
            self.hold(self._running)
        metrics["eval/step"] = float(step)

    def ends(self) -> None:
        self._running.set_result(None)


def test_an_evaluation_that_is_pinned_blocks_pushes_and_the_last_one_follows_while_the_trainer_waits() -> None:
    """Begun after step 1, ended while step 4 is waited for: steps 2 and 3 are trained meanwhile, and of their weights only those
    of step 3 are sent."""
    sync, evaluations = FakeSync(), _Evaluations(1)
    lines, _ = _run(sync, _Source({4: evaluations.ends}), steps=4, evaluations=evaluations)
    assert sync.events == ["sleep", "push 1", "sleep", "sleep", "push 3", "sleep", "push 4"]
    assert ["sync/held" in line for line in lines] == [False, True, True, False]
    assert [line["eval/step"] for line in lines] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("last", "is_complete"), [([], True), (None, False)])
def test_the_run_is_over_at_the_end_of_the_data_and_not_when_it_is_stopped(
    last: list[ScoredGroup] | None, is_complete: bool
) -> None:
    class Ending(_Source):
        def take(self, num_groups: int, **more: Any) -> Any:
            self.is_stopping = self.num_taken == 2 and last is None
            return super().take(num_groups, **more) if self.num_taken < 2 else last

    trainer = make_trainer(fake_context(loop_config(training={"max_steps": 9})), Ending({}), [])
    assert trainer.train() == 2
    assert trainer.is_complete == is_complete
