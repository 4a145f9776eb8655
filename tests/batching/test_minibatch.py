"""Groups of a step, divided into optimizer updates, and their weights: samples of 1 and 3 trained tokens unless said otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_async.batching.minibatch import split_groups, token_weights
from grpo_async.batching.plan import BatchPlan, MicroBatchPlan
from grpo_async.config.sections import Reduction
from tests.support.records import make_sample, make_scored


@pytest.mark.parametrize(
    ("num_groups", "num_minibatches", "sizes"),
    [(5, 2, [3, 2]), (6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (2, 8, [1, 1]), (4, 1, [4])],
)
def test_groups_are_divided_evenly_in_their_order(num_groups: int, num_minibatches: int, sizes: list[int]) -> None:
    parts = split_groups([make_scored(index) for index in range(num_groups)], num_minibatches)
    assert [len(part.groups) for part in parts] == sizes
    ids = [group.group.group_id for part in parts for group in part.groups]
    assert ids == list(range(num_groups))


def test_completions_that_were_scored_and_are_not_trained_are_counted_as_masked() -> None:
    """Two completions in each group; of the second group one was cut and is masked."""
    cut = make_scored(1)
    (part,) = split_groups([make_scored(0), replace(cut, samples=cut.samples[:1])], 1)
    assert len(part.samples) == 3
    assert part.num_masked == 1


_SAMPLES = [make_sample(completion=[5]), make_sample(completion=[5, 6, 7])]


def _plan(*ranks: list[list[list[int]]]) -> BatchPlan:
    return BatchPlan(ranks=[[MicroBatchPlan(rows=rows, row_tokens=8) for rows in rank] for rank in ranks])


def test_a_sample_without_trained_tokens_counts_like_one_that_was_masked() -> None:
    """1 / (3 x 1), 1 / (3 x 3); the weight of the one without tokens is used by none."""
    samples = [*_SAMPLES, make_sample(completion=[])]
    weights = token_weights(samples, _plan([[[0, 1, 2]]]), reduction="grpo", max_completion_tokens=10)
    assert weights[:2] == pytest.approx([1 / 3, 1 / 9])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("grpo", [1 / 8, 1 / 8, 1 / 6]), ("dr_grpo", [1 / 20, 1 / 20, 1 / 20]), ("dapo", [1 / 7, 1 / 7, 1 / 7])],
)
def test_an_agents_completion_counts_once_however_many_branches_it_has(
    reduction: Reduction, expected: list[float]
) -> None:
    """Branches of 1 and 3 trained tokens, beside a completion of 3: 1 / (2 x 4), 1 / (2 x 3)."""
    main, other = _SAMPLES
    samples = [main, replace(other, rollout_id=f"{main.rollout_id}.b1"), other]
    plan = _plan([[[0, 1, 2]]])
    assert token_weights(samples, plan, reduction=reduction, max_completion_tokens=10) == pytest.approx(expected)


def test_bnpo_is_the_mean_of_the_token_means_of_the_micro_batches_that_have_tokens() -> None:
    """Three micro-batches of 1, 3 and 1 + 3 tokens on two ranks, and an empty one: 1 / (3 x 1), 1 / (3 x 3), 1 / (3 x 4)."""
    samples = [*_SAMPLES, *_SAMPLES]
    plan = _plan([[[0]], [[1]]], [[[2], [3]], []])
    weights = token_weights(samples, plan, reduction="bnpo", max_completion_tokens=10)
    assert weights == pytest.approx([1 / 3, 1 / 9, 1 / 12, 1 / 12])
