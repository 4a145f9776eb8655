"""The main loop and optimizer updates: which ranks get what, and what happens to the groups of an update that was skipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.training.ranks import PackCommand, StepCommand, StopCommand, follow
from grpo_async.training.step import StepResult
from grpo_async.utils.seeds import seed_of
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


def _one_step(updates: tuple[bool, ...]) -> tuple[_Source, list[list[Any]], dict[str, float]]:
    """A step of three minibatches on two ranks, with the outcome `updates`: the source, what the ranks were sent to pack and to
    train, and the metrics."""
    config = loop_config(
        rollout={"groups_per_step": 4, "group_size": 2},
        training={"max_steps": 1, "minibatches": 3},
        optimizer={"lr": 0.5},
        loss={"type": "grpo"},
    )
    metrics = {"training/skipped_updates": float(updates.count(False))}
    result = StepResult(loss=0.0, grad_norm=1.0, num_tokens=4 * sum(updates), updates=updates, metrics=metrics)
    context = fake_context(config, world_size=2, step=lambda *_, **__: result)
    source = _Source()
    lines: list[dict[str, float]] = []
    assert make_trainer(context, source, lines).train() == 1
    sent = [list(parts) for parts in context.channel.sent if isinstance(parts[0], (PackCommand, StepCommand))]
    return source, sent, lines[0]


def test_each_rank_gets_its_part_of_each_minibatch() -> None:
    """Groups 0, 2 and 3 have two samples of two trained tokens each: a minibatch of its own for each, a sample for each rank."""
    _, (packs, commands), _ = _one_step((True, True, True))
    assert [command.lr for command in commands] == [0.5, 0.5]
    assert [command.token_capacity for command in commands] == [6, 6]
    assert [command.seed for command in commands] == [seed_of(0, 1, 0), seed_of(0, 1, 1)]
    for command in packs:
        packed = [samples.pack() for samples in command.minibatches]
        assert [[batch.num_trained_tokens for batch in minibatch] for minibatch in packed] == [[2], [2], [2]]
        assert {batch.minibatch_tokens for minibatch in packed for batch in minibatch} == {4}


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
    source, _, line = _one_step(updates)
    assert source.closed == [([1], GroupStatus.FILTERED), *closed]
    assert line["training/skipped_updates"] == updates.count(False)


@pytest.mark.parametrize(
    ("taken", "packed"),
    [
        pytest.param([2, 3], [[0, 1], [2, 3], "step", "step"], id="what was reserved: it is packed already"),
        pytest.param([2, 4], [[0, 1], [2, 3], "step", [2, 4], "step"], id="another group: packed again"),
    ],
)
def test_the_next_step_is_packed_while_a_step_trains(taken: list[int], packed: list[Any]) -> None:
    """`packed`: what the ranks were told to pack, and the end of each step. The version of the tokens of a group is its id."""
    seen: list[Any] = []
    reserved = [make_scored(index, version=index) for index in (2, 3)]
    steps = iter([[0, 1], taken])

    class Source(FakeSource):
        def take(self, num_groups: int, **_: Any) -> list[ScoredGroup]:
            groups = next(steps)
            return reserved if groups == [2, 3] else [make_scored(index, version=index) for index in groups]

        def reserve(self, num_groups: int, *, trainer_version: int) -> list[ScoredGroup]:
            assert trainer_version == 1  # nothing is reserved for a third step
            return reserved

    def pack(command: PackCommand) -> None:
        seen.append(sorted({*command.minibatches[0].policy_versions.tolist()} - {-1}))

    def step(command: StepCommand, *, before_sync: Any) -> StepResult:
        before_sync()
        seen.append("step")
        return StepResult(loss=0.0, grad_norm=1.0, num_tokens=4, updates=(True,), metrics={})

    config = loop_config(rollout={"groups_per_step": 2, "group_size": 2}, training={"max_steps": 2})
    context = fake_context(config, pack=pack, step=step)
    assert make_trainer(context, Source(), []).train() == 2
    assert seen == packed


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
