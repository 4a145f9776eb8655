"""Planning rows, micro-batches and ranks."""

from __future__ import annotations

import random

import pytest

from grpo_async.batching.plan import BatchPlan, plan_batch


def _plan(lengths: list[int], **changes: object) -> BatchPlan:
    settings: dict[str, object] = {
        "num_ranks": 1,
        "micro_batch_tokens": 64,
        "row_tokens": None,
        "pack": True,
        **changes,
    }
    return plan_batch(lengths, **settings)  # type: ignore[arg-type]


def test_samples_are_packed_first_fit_by_decreasing_length() -> None:
    plan = _plan([5, 3, 4, 2], row_tokens=8, micro_batch_tokens=16)
    assert plan.row_tokens == 8
    assert plan.ranks == [[[[0, 1], [2, 3]]]]  # 5 + 3 = 8, 4 + 2 = 6; two rows of 8 = 16 tokens


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("pack", [True, False])
def test_every_sample_is_planned_once_and_no_limit_is_broken(num_ranks: int, pack: bool) -> None:
    rng = random.Random(num_ranks)
    lengths = [rng.randint(1, 60) for _ in range(37)]
    plan = _plan(lengths, num_ranks=num_ranks, micro_batch_tokens=200, pack=pack)
    rows = [row for rank in plan.ranks for micro_batch in rank for row in micro_batch]
    assert sorted(index for row in rows for index in row) == list(range(37))
    assert all(sum(lengths[index] for index in row) <= plan.row_tokens for row in rows)
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    assert all(len(micro_batch) * plan.row_tokens <= 200 for rank in plan.ranks for micro_batch in rank)


def test_ranks_get_balanced_attention_cost() -> None:
    lengths = [40, 40, 10, 10, 10, 10, 10, 10, 10, 10]
    plan = _plan(lengths, num_ranks=2, micro_batch_tokens=80, row_tokens=40)
    costs = [sum(lengths[i] ** 2 for batch in rank for row in batch for i in row) for rank in plan.ranks]
    assert costs == [2000, 2000]  # 40^2 + 4 x 10^2 each


def test_more_ranks_than_rows_leaves_empty_micro_batches_not_missing_ones() -> None:
    plan = _plan([5], num_ranks=3)
    assert [len(rank) for rank in plan.ranks] == [1, 1, 1]
    assert sum(len(rank[0]) for rank in plan.ranks) == 1


def test_a_sample_longer_than_a_micro_batch_is_refused_by_name_of_the_setting() -> None:
    with pytest.raises(ValueError, match=r"training\.micro_batch_tokens = 64"):
        _plan([65])
