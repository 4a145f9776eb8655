"""The main loop and optimizer updates: which ranks get what, and what becomes of the groups of an update that was skipped."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.records import GroupStatus, ScoredGroup, TokenFlag, TokenStats
from grpo_async.training.ranks import StepCommand
from grpo_async.training.step import StepResult
from grpo_async.utils.seeds import seed_of
from tests.support.records import make_scored
from tests.trainer.fakes import FakeSource, fake_context, loop_config, make_leader


class _Source(FakeSource):
    """Four groups, of which the second has nothing to train. `cut`: the last has one completion that was scored and is masked."""

    def __init__(self, *, cut: bool, kept: Container[int] = range(4)) -> None:
        self._cut = cut
        self._kept = kept
        self.closed: list[tuple[list[int], GroupStatus]] = []
        self.statistics: list[Mapping[str, TokenStats]] = []

    def take(self, num_groups: int, **_: Any) -> list[ScoredGroup]:
        groups = [make_scored(index, has_samples=index != 1) for index in range(num_groups)]
        return [*groups[:-1], replace(groups[-1], samples=groups[-1].samples[:1])] if self._cut else groups

    def stores(self, group_id: int) -> bool:
        return group_id in self._kept

    def close_groups(self, groups: Sequence[ScoredGroup], status: GroupStatus, *, step: int, stats: Any = None) -> None:
        assert step == 1
        self.closed.append(([group.group.group_id for group in groups], status))
        if stats is not None:
            self.statistics.append(stats)


def _one_step(
    updates: tuple[bool, ...], *, cut: bool = False, kept: Container[int] = range(4), **record: Any
) -> tuple[_Source, list[StepCommand], dict[str, float]]:
    """A step of three minibatches on two ranks, with the outcome `updates`. Both ranks have collected 1, 2, 3 ... in each row,
    those of the second 100 more."""
    config = loop_config(
        rollout={"groups_per_step": 4, "group_size": 2},
        training={"max_steps": 1, "minibatches": 3},
        optimizer={"lr": 0.5},
        loss={"type": "grpo"},
        record={"rollouts": record},
    )
    sent: list[list[Any]] = []
    metrics = {"training/skipped_updates": float(updates.count(False))}
    result = StepResult(loss=0.0, grad_norm=1.0, num_tokens=4 * sum(updates), updates=updates, metrics=metrics)

    def collected(room: int) -> list[torch.Tensor] | None:
        numbers = torch.arange(1.0, room + 1.0).expand(5, -1)
        return [numbers, numbers + 100.0] if room else None

    context = fake_context(
        config,
        [],
        num_ranks=2,
        channel=SimpleNamespace(send=sent.append),
        step=lambda command, _: replace(result, token_statistics=collected(command.token_room)),
    )
    source = _Source(cut=cut, kept=kept)
    lines: list[dict[str, float]] = []
    assert make_leader(context, source, lines).train() == 1
    (commands,) = [parts for parts in sent if isinstance(parts[0], StepCommand)]
    return source, commands, lines[0]


def test_each_rank_gets_its_part_of_each_minibatch() -> None:
    """Groups 0, 2 and 3 have two samples of two trained tokens each: a minibatch of its own for each, a sample for each rank."""
    _, commands, _ = _one_step((True, True, True))
    assert [command.lr for command in commands] == [0.5, 0.5]
    assert [command.seed for command in commands] == [seed_of(0, 1, 0), seed_of(0, 1, 1)]
    for command in commands:
        tokens = [[batch.num_trained_tokens for batch in minibatch] for minibatch in command.pack()]
        assert tokens == [[2], [2], [2]]
        assert {batch.minibatch_tokens for minibatch in command.pack() for batch in minibatch} == {4}


@pytest.mark.parametrize(
    ("updates", "closed"),
    [
        ((True, True, True), [([0, 2, 3], GroupStatus.TRAINED)]),
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


def test_the_statistics_of_both_ranks_come_back_to_their_rollouts_and_those_of_a_skipped_update_are_flagged() -> None:
    """Each rank has one sample of two tokens in each of three updates: 1 2, 3 4, 5 6 and 101 102, 103 104, 105 106."""
    source, commands, _ = _one_step((True, False, True))
    assert [command.token_room for command in commands] == [6, 6]
    for statistics in source.statistics:
        assert {key: list(row.logprobs) for key, row in statistics.items()} == {
            "g0-r0": [1.0, 2.0], "g0-r1": [101.0, 102.0],
            "g2-r0": [3.0, 4.0], "g2-r1": [103.0, 104.0],
            "g3-r0": [5.0, 6.0], "g3-r1": [105.0, 106.0],
        }  # fmt: skip
        assert [int(flag) for flag in statistics["g0-r0"].flags] == [1, 2]
        assert [int(flag) for flag in statistics["g2-r0"].flags] == [3 | TokenFlag.SKIPPED, 4 | TokenFlag.SKIPPED]
