from __future__ import annotations

import pytest

from grpo_async.scoring.advantages import (
    batch_advantages,
    combine_rewards,
    group_advantages,
    has_zero_variance,
    leave_one_out_advantages,
    normalize_each,
    normalized_over_step,
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
        [None, None],
        [1.0, None],
        [1.0, 1.0],
        [0.1 + 0.2, 0.3, 0.3],  # 0.30000000000000004 and 0.3
        [1e9, 1e9 + 1e-4],  # noise relative to the size
        [1.0 - 1e-12, 1.0, 1.0 + 1e-12],
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


def test_leave_one_out_is_the_group_advantage_times_n_over_n_minus_1() -> None:
    # 1, 2, None, 6: the others of 1: 4, of 2: 3.5, of 6: 1.5
    assert leave_one_out_advantages([1.0, 2.0, None, 6.0]) == pytest.approx([-3.0, -1.5, 0.0, 4.5])
    assert leave_one_out_advantages([1.0, None]) == [0.0, 0.0]


def test_the_std_of_a_batch_is_that_of_scored_rewards_only() -> None:
    # 0, 2, 4: mean 2, std 2; group means 1 and 4: -1, 1 and nothing for a group of one
    assert batch_advantages([[0.0, 2.0, None], [4.0, None]]) == [
        pytest.approx([-1 / 2.0001, 1 / 2.0001, 0.0]),
        [0.0, 0.0],
    ]
    assert batch_advantages([[None], []]) == [[0.0], []]


def test_each_reward_is_normalized_before_they_are_added() -> None:
    # a: 0.5 / (0.7071068 + 1e-4) = 0.7070068; b: 10 / (14.1421356 + 1e-4) = 0.7071018; 0.7070068 + 0.5 x 0.7071018 = 1.0605577
    rows: list[dict[str, float | None]] = [{"a": 1.0, "b": 30.0}, {"a": 0.0, "b": 10.0}]
    assert normalize_each(rows, {"a": 1.0, "b": 0.5}) == pytest.approx([1.0605577, -1.0605577])
    assert normalize_each([*rows, {"a": None, "b": None}], {"a": 1.0, "b": 0.5})[2] is None


def test_what_is_normalized_is_divided_by_the_std_of_the_step() -> None:
    # 1, -1, 0, 0: std = sqrt(2 / 3) = 0.8164966; 1 / 0.8165966 = 1.2245949; the unscored one does not count
    first, second = normalized_over_step([[1.0, -1.0, None], [0.0, 0.0]])
    assert first == pytest.approx([1.2245949, -1.2245949, 0.0])
    assert second == [0.0, 0.0]
    assert normalized_over_step([[None, None]]) == [[0.0, 0.0]]
