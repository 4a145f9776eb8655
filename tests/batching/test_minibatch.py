"""Groups of a step, divided into optimizer updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_async.batching.minibatch import split_groups
from tests.support.records import make_scored


@pytest.mark.parametrize(
    ("num_groups", "num_minibatches", "sizes"),
    [(5, 2, [3, 2]), (6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (2, 8, [1, 1]), (4, 1, [4])],
)
def test_groups_are_divided_evenly_in_their_order(num_groups: int, num_minibatches: int, sizes: list[int]) -> None:
    parts = split_groups([make_scored(index) for index in range(num_groups)], num_minibatches)
    assert [len(part.groups) for part in parts] == sizes
    ids = [group.group.group_id for part in parts for group in part.groups]
    assert ids == list(range(num_groups))


def test_groups_without_samples_take_no_part() -> None:
    groups = [make_scored(0), make_scored(1, has_samples=False), make_scored(2)]
    parts = split_groups(groups, 2)
    assert [[group.group.group_id for group in part.groups] for part in parts] == [[0], [2]]
    assert split_groups(groups[1:2], 2) == []


def test_completions_that_were_scored_and_are_not_trained_are_counted_as_masked() -> None:
    """Two completions in each group; of the second group one was cut and is masked."""
    cut = make_scored(1)
    (part,) = split_groups([make_scored(0), replace(cut, samples=cut.samples[:1])], 1)
    assert len(part.samples) == 3
    assert part.num_masked == 1
