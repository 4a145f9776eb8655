"""The figures of tokens on their last way: from the trainer through the rollout side into the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from grpo_async.records import GroupStatus, RolloutSample, ScoredGroup, TokenFigures, TokenMark
from grpo_async.store.reader import read_groups
from tests.launcher.sides import odd_or_even, open_side, side_config, take
from tests.support.local_server import local_server


def _figures(groups: list[ScoredGroup]) -> dict[str, TokenFigures]:
    """-1, -2, ... for the tokens of each sample."""

    def of(sample: RolloutSample) -> TokenFigures:
        numbers = np.arange(1, sample.num_trained_tokens + 1, dtype=np.float32)
        marks = np.full(len(numbers), TokenMark.CLIPPED_LOW, dtype=np.uint8)
        return TokenFigures(logprobs=-numbers, proximal_logprobs=-numbers, weights=numbers, entropies=numbers, marks=marks)  # type: ignore[arg-type]  # fmt: skip

    return {sample.rollout_id: of(sample) for group in groups for sample in group.samples}


def test_what_the_trainer_says_of_a_step_is_stored_with_the_rollouts_it_is_of(tiny_model: Path, tmp_path: Path) -> None:
    """Two groups of two; the figures of the second are missing, as those of a group that is not stored."""
    config = side_config(tmp_path, tiny_model)
    with local_server(odd_or_even) as server, open_side(config, server) as side:
        side.source.start()
        groups = take(side, 2)
        assert groups is not None
        assert all(side.source.stores(group.group.group_id) for group in groups)
        side.source.settle_step(groups, GroupStatus.TRAINED, step=1, figures=_figures(groups[:1]))
        settled = {group.group.group_id for group in groups}
    first, second = (group for group in read_groups(config.run_path / "rollouts") if group.group_id in settled)
    for rollout in first.rollouts:
        assert rollout.mask == [1, 1]
        assert (rollout.trainer_logprobs, rollout.weights) == ([-1.0, -2.0], [1.0, 2.0])
        assert rollout.marks == [TokenMark.CLIPPED_LOW] * 2
    assert all(rollout.weights is None for rollout in second.rollouts)
    assert (first.step, second.step) == (1, 1)


def test_the_trainer_is_told_which_groups_the_store_leaves_out(tiny_model: Path, tmp_path: Path) -> None:
    """Half of them; and those it says are stored are what the store has."""
    config = side_config(
        tmp_path, tiny_model, record={"rollouts": {"sample_rate": 0.5}}, rollout={"groups_per_step": 12}
    )
    with local_server(odd_or_even) as server, open_side(config, server) as side:
        side.source.start()
        groups = take(side, 12)
        assert groups is not None
        kept = {group.group.group_id for group in groups if side.source.stores(group.group.group_id)}
        side.source.settle_step(groups, GroupStatus.TRAINED, step=1, figures=_figures(groups))
    assert 0 < len(kept) < 12
    assert {g.group_id for g in read_groups(config.run_path / "rollouts") if g.status is GroupStatus.TRAINED} == kept
