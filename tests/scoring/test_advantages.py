"""What the comparison with TRL (test_equality_with_trl) does not show: numbers by hand, and rewards without a signal."""

from __future__ import annotations

import pytest

from grpo_async.scoring.advantages import (
    combine_rewards,
    group_advantages,
    has_zero_variance,
)


def test_advantages_divide_by_the_sample_standard_deviation_of_what_was_scored() -> None:
    # mean 0.5; squared distances 4 x 0.25 = 1; std = sqrt(1 / 3) = 0.5773503; 0.5 / (0.5773503 + 0.0001) = 0.8658754
    assert group_advantages([1.0, 0.0, 1.0, 0.0]) == pytest.approx([0.8658754, -0.8658754, 0.8658754, -0.8658754])
    # 1, 2, 3: mean 2, std = sqrt(2 / 2) = 1, so +-1 / 1.0001 = +-0.9999
    assert group_advantages([1.0, None, 2.0, 3.0]) == pytest.approx([-0.99990001, 0.0, 0.0, 0.99990001])
    assert group_advantages([1.0, 2.0, None, 6.0], scale="none") == [-2.0, -1.0, 0.0, 3.0]  # mean 9 / 3 = 3


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


def test_combined_rewards_are_the_weighted_sum_of_what_was_scored() -> None:
    rows: list[dict[str, float | None]] = [
        {"a": 1.0, "b": 0.4},
        {"a": None, "b": 0.4},
        {"a": None, "b": None},
        {"a": 0.0, "b": None},
    ]
    # 1 + 0.5 x 0.4 = 1.2; 0.5 x 0.4 = 0.2
    assert combine_rewards(rows, {"a": 1.0, "b": 0.5}) == [1.2, 0.2, None, 0.0]
