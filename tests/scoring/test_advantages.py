"""What the comparison with TRL (test_equality_with_trl) does not show: numbers by hand, and rewards without a signal."""

from __future__ import annotations

import pytest

from grpo_async.scoring.advantages import (
    group_advantages,
    has_zero_variance,
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
