"""Metrics of a step's groups."""

from __future__ import annotations

import random

import pytest

from grpo_async.records import RolloutGroup, ScoredGroup
from grpo_async.rollout.metrics import group_metrics
from tests.support.records import make_completion, make_prompt


def _scored(rewards: list[float | None], lengths: list[int], **logged: float) -> ScoredGroup:
    completions = [make_completion(f"r{i}", ids=[5] * length) for i, length in enumerate(lengths)]
    return ScoredGroup(
        group=RolloutGroup(
            group_id=0, prompt=make_prompt(), completions=[*completions, make_completion("f", failed=True)]
        ),
        samples=[],
        rewards=rewards,
        reward_parts=[{"f": reward} for reward in rewards],
        metrics=logged,
    )


def test_means_are_over_what_exists_and_nothing_is_filled_with_zero() -> None:
    """R1.5. Rewards 0, 1 and 1, None: mean 2 / 3, std sqrt((4 + 1 + 1) / 9 / 2) = sqrt(1 / 3); one group has one value."""
    metrics = group_metrics([_scored([0.0, 1.0], [2, 4], seen=1.0), _scored([1.0, None], [6, 8])])
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert metrics["rewards/f/mean"] == pytest.approx(2 / 3)
    assert metrics["reward_std"] == pytest.approx((1 / 3) ** 0.5)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["seen"] == 1.0  # logged by one group only
    assert metrics["completions/mean_length"] == 5.0  # the failed rollout has no length
    assert metrics["completions/max_length"] == 8.0
    assert metrics["completions/clipped_ratio"] == 0.0


def test_the_order_in_which_groups_were_done_changes_no_bit() -> None:
    """After a resume, groups that were made one after the other are made side by side."""
    numbers = random.Random(0)
    groups = [_scored([numbers.random() for _ in range(4)], [1, 2, 3, 4]) for _ in range(8)]
    expected = group_metrics(groups)
    for _ in range(20):
        numbers.shuffle(groups)
        assert group_metrics(groups) == expected


def test_groups_without_any_reward_have_no_reward_metric() -> None:
    assert "reward" not in group_metrics([_scored([None, None], [1, 1])])
