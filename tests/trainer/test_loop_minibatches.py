"""The main loop and optimizer updates: what ranks train on, and what happens to the groups of an update that was skipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.training.ranks import StopCommand, follow
from grpo_async.training.step import StepResult
from tests.support.rank_jobs import fingerprint
from tests.support.ranks import run_on_ranks
from tests.support.records import make_scored
from tests.trainer.fakes import FakeSource, FakeSync, fake_context, loop_config, make_trainer
from tests.training.statistics_jobs import make_config, make_context, make_groups


class _Source(FakeSource):
    """Four groups, of which the second has nothing to train."""

    def __init__(self) -> None:
        self.closed: list[tuple[list[int], GroupStatus]] = []

    def take(self, num_groups: int, **_: Any) -> list[ScoredGroup]:
        return [make_scored(index, has_samples=index != 1) for index in range(num_groups)]

    def close_groups(self, groups: Sequence[ScoredGroup], status: GroupStatus, *, step: int, stats: Any = None) -> None:
        assert step == 1
        if groups:
            self.closed.append(([group.group.group_id for group in groups], status))


@pytest.mark.parametrize(
    ("updates", "closed"),
    [
        ((True, False, True), [([0, 3], GroupStatus.TRAINED), ([2], GroupStatus.FAILED)]),
        ((False, False, False), [([0, 2, 3], GroupStatus.FAILED)]),
    ],
)
def test_the_groups_of_a_skipped_update_are_failed_and_the_others_trained(
    updates: tuple[bool, ...], closed: list[tuple[list[int], GroupStatus]]
) -> None:
    config = loop_config(rollout={"groups_per_step": 4, "group_size": 2}, training={"max_steps": 1, "minibatches": 3})
    result = StepResult(loss=0.0, grad_norm=1.0, num_tokens=4 * sum(updates), updates=updates, metrics={})
    source = _Source()
    context = fake_context(config, world_size=2, step=lambda *_, **__: result)
    assert make_trainer(context, source, []).train() == 1
    assert source.closed == [([1], GroupStatus.FILTERED), *closed]


def train_on_ranks(model: str) -> dict[str, Any]:
    """The weights after three steps on the same groups: nothing is reserved, or what is taken next, or something else."""
    found = {}
    for mode in ("never", "holds", "breaks"):
        context = make_context(model, make_config({"type": "grpo"}, minibatches=2, max_steps=3), reference=None)
        if dist.get_rank() > 0:
            follow(context)
            found[mode] = fingerprint(context.policy)
            continue
        groups = make_groups(12)
        steps = [groups[:4], groups[4:8], groups[8:]]
        reserved = {"never": [[], []], "holds": steps[1:], "breaks": [groups[2:6], groups[:4]]}[mode]

        class Source(FakeSource):
            def __init__(self, steps: list[list[ScoredGroup]], reserved: list[list[ScoredGroup]]) -> None:
                self.steps, self.reserved = iter(steps), iter(reserved)

            def take(self, *_: Any, **__: Any) -> list[ScoredGroup]:
                return next(self.steps)

            def reserve(self, *_: Any, **__: Any) -> list[ScoredGroup]:
                return next(self.reserved)

        context.checkpoints = SimpleNamespace(poll=lambda: None, take_metrics=dict)  # type: ignore[assignment]
        context.parameters = SimpleNamespace(specs=[])  # type: ignore[assignment]
        assert make_trainer(context, Source(steps, reserved), [], sync=FakeSync(up=False)).train() == 3
        context.channel.send([StopCommand()] * context.world_size)
        found[mode] = fingerprint(context.policy)
    return found


def test_ranks_train_on_what_was_taken_whatever_was_reserved(tiny_model: Path, tmp_path: Path) -> None:
    found = run_on_ranks("train_on_ranks", 2, tmp_path, module=__name__, model=tiny_model)
    assert found["never"] == found["holds"] == found["breaks"]
