"""What the comparison with TRL (test_equality_with_trl) does not show: numbers by hand, and rewards without a signal."""

from __future__ import annotations

import random

import pytest
import torch

from grpo_async.errors import RunError
from grpo_async.scoring.advantages import (
    group_advantages,
    has_zero_variance,
    maxrl_advantages,
    whitened_advantages,
)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize(
    "rewards",
    [
        [],
        [1.0, None],
        [1.0, 1.0],
        [0.1 + 0.2, 0.3, 0.3],  # 0.30000000000000004 and 0.3
        [1e9, 1e9 + 1e-4],  # noise relative to the size
        [-1e-13, 1e-13],  # noise around 0
    ],
)
def test_equal_rewards_give_exactly_zero(rewards: list[float | None], scale: str) -> None:
    assert group_advantages(rewards, scale=scale) == [0.0] * len(rewards)  # type: ignore[arg-type]
    assert has_zero_variance(rewards)


def test_small_real_differences_are_kept() -> None:
    # 0 and 1e-6: mean 5e-7, std = 1e-6 / sqrt(2) = 7.0711e-7; 5e-7 / (7.0711e-7 + 1e-4) = 0.0049649
    assert group_advantages([0.0, 1e-6]) == pytest.approx([-0.0049649, 0.0049649], rel=1e-4)
    assert not has_zero_variance([0.0, 1e-6])


def test_maxrl_divides_by_the_mean_and_takes_no_negative_rewards() -> None:
    assert maxrl_advantages([1.0, 0.0, None, 0.0, 0.0]) == [3.0, -1.0, 0.0, -1.0, -1.0]
    assert maxrl_advantages([1.0, 1.0]) == [0.0, 0.0]
    with pytest.raises(RunError, match=r"maxrl.*-0\.5"):
        maxrl_advantages([1.0, -0.5])


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_step() -> None:
    """By the formula, on one value for each token."""
    chance = random.Random(0)
    groups = [[chance.gauss(0.0, 3.0) for _ in range(4)] for _ in range(5)] + [[2.0] * 4]
    tokens = [[chance.randrange(1, 9) for _ in rewards] for rewards in groups]
    centered = [torch.tensor(rewards) - sum(rewards) / 4 for rewards in groups]
    of_tokens = torch.cat([c.repeat_interleave(torch.tensor(t)) for c, t in zip(centered, tokens, strict=True)])
    wanted = [(c - of_tokens.mean()) / (of_tokens.var() + 1e-8).sqrt() for c in centered]
    found = whitened_advantages(groups, tokens)
    torch.testing.assert_close(torch.tensor(found[:-1]), torch.stack(wanted[:-1]), rtol=1e-5, atol=1e-6)
    assert found[-1] == [0.0] * 4  # nothing to learn from it
    assert whitened_advantages([[1.0, 0.0], [3.0, 3.0]], [[1, 1], [1, 1]])[0] == pytest.approx(
        [1.22474, -1.22474], rel=1e-5
    )
