"""Planning rows, micro-batches and ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from grpo_async.batching.plan import EMPTY_ROW_TOKENS, BatchPlan, plan_batch

LIMIT = 200
SHAPES: dict[str, Callable[[random.Random], int]] = {
    "even": lambda draw: draw.randint(2, LIMIT),
    "lognormal": lambda draw: min(LIMIT, 2 + int(draw.lognormvariate(3.0, 1.0))),
    "half": lambda draw: LIMIT // 2 + draw.randint(-9, 9),  # two fit or do not
    "whole": lambda draw: LIMIT,
}


def _plan(lengths: list[int], *, world_size: int = 1, micro_batch_tokens: int = 64, pack: bool = True) -> BatchPlan:
    return plan_batch(lengths, world_size=world_size, micro_batch_tokens=micro_batch_tokens, pack=pack)


def _cases() -> list[tuple[list[int], int]]:
    """Lengths and ranks of 48 steps, from one sample to 60."""
    draw = random.Random(0)
    return [
        ([shape(draw) for _ in range(draw.choice([1, 2, 5, 17, 60]))], world_size)
        for shape in SHAPES.values()
        for world_size in (1, 2, 3, 8)
        for _ in range(3)
    ]


def _cost(indices: Sequence[int], lengths: Sequence[int]) -> int:
    """Of a packed micro-batch: 16,384 for each token, and the square of each sample."""
    return sum(16_384 * lengths[index] + lengths[index] ** 2 for index in indices)


def _first_fit(lengths: Sequence[int]) -> int:
    """Micro-batches of first-fit by decreasing length; it needs at most 11/9 of the fewest possible, and one (Johnson 1974)."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        number = next((number for number, room in enumerate(rooms) if room >= length), len(rooms))
        rooms[number:] = [LIMIT if number == len(rooms) else rooms[number], *rooms[number + 1 :]]
        rooms[number] -= length
    return len(rooms)


@pytest.mark.parametrize("pack", [True, False])
def test_every_sample_is_planned_once_no_limit_is_broken_and_no_micro_batch_is_one_too_many(pack: bool) -> None:
    for lengths, world_size in _cases():
        plan = _plan(lengths, world_size=world_size, micro_batch_tokens=LIMIT, pack=pack)
        forwards = [each for rank in plan.ranks for each in rank]
        assert sorted(index for each in forwards for index in each.indices) == list(range(len(lengths)))
        assert len(plan.ranks) == world_size
        assert len({len(rank) for rank in plan.ranks}) == 1
        assert all(len(each.rows) * each.row_tokens <= LIMIT for each in forwards)
        assert plan == _plan(list(lengths), world_size=world_size, micro_batch_tokens=LIMIT, pack=pack)
        if not pack:
            continue
        filled = [each for each in forwards if each.rows]
        assert all(len(each.rows) == 1 for each in filled)
        assert all(each.row_tokens == sum(lengths[index] for index in each.indices) for each in filled), "padded"
        assert plan.num_computed_tokens == sum(lengths) + EMPTY_ROW_TOKENS * (len(forwards) - len(filled))
        assert len(plan.ranks[0]) == -(-_first_fit(lengths) // world_size)
        together = [[_cost(each.indices, lengths) for each in column] for column in zip(*plan.ranks, strict=True)]
        assert all(min(costs) >= max(later) for costs, later in pairwise(together)), "what runs at once is alike"
        costs = [sum(_cost(each.indices, lengths) for each in rank) for rank in plan.ranks]
        assert max(costs) - min(costs) <= max(max(column) - min(column) for column in together)


def test_an_unpacked_row_is_as_long_as_the_longest_sample_of_its_micro_batch() -> None:
    plan = _plan([30, 6, 30, 5], micro_batch_tokens=60, pack=False)
    assert [[(each.rows, each.row_tokens) for each in rank] for rank in plan.ranks] == [
        [([[0], [1]], 30), ([[2], [3]], 30)],
    ]
    assert plan.num_computed_tokens == 2 * 30 + 2 * 30
