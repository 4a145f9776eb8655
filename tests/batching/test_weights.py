"""Reductions: samples of 1 and 3 trained tokens unless said otherwise."""

from __future__ import annotations

import pytest

from grpo_async.batching.plan import BatchPlan, MicroBatchPlan
from grpo_async.batching.weights import token_weights
from grpo_async.config.sections import Reduction
from tests.support.records import make_sample

_SAMPLES = [make_sample(completion=[5]), make_sample(completion=[5, 6, 7])]


def _plan(*ranks: list[list[list[int]]]) -> BatchPlan:
    return BatchPlan(ranks=[[MicroBatchPlan(rows=rows, row_tokens=8) for rows in rank] for rank in ranks])


_TOGETHER = _plan([[[0, 1]]])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("dapo", [0.25, 0.25]),  # 1 / 4
        ("grpo", [0.5, 1 / 6]),  # 1 / (2 x 1), 1 / (2 x 3)
        ("dr_grpo", [0.05, 0.05]),  # 1 / (2 x 10)
        ("bnpo", [0.25, 0.25]),  # one micro-batch of 4 tokens
    ],
)
def test_weights_follow_the_formulas(reduction: Reduction, expected: list[float]) -> None:
    weights = token_weights(_SAMPLES, _TOGETHER, reduction=reduction, max_completion_tokens=10)
    assert weights == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("dapo", [0.25, 0.25]),
        ("grpo", [1 / 4, 1 / 12]),  # 1 / (4 x 1), 1 / (4 x 3)
        ("dr_grpo", [0.025, 0.025]),  # 1 / (4 x 10)
    ],
)
def test_samples_that_were_masked_whole_count_in_means_over_samples(
    reduction: Reduction, expected: list[float]
) -> None:
    weights = token_weights(_SAMPLES, _TOGETHER, reduction=reduction, max_completion_tokens=10, num_masked=2)
    assert weights == pytest.approx(expected)


def test_a_sample_without_trained_tokens_counts_like_one_that_was_masked() -> None:
    """1 / (3 x 1), 1 / (3 x 3); the weight of the one without tokens is used by none."""
    samples = [*_SAMPLES, make_sample(completion=[])]
    weights = token_weights(samples, _plan([[[0, 1, 2]]]), reduction="grpo", max_completion_tokens=10)
    assert weights[:2] == pytest.approx([1 / 3, 1 / 9])


def test_bnpo_is_the_mean_of_the_token_means_of_the_micro_batches_that_have_tokens() -> None:
    """Three micro-batches of 1, 3 and 1 + 3 tokens on two ranks, and an empty one: 1 / (3 x 1), 1 / (3 x 3), 1 / (3 x 4)."""
    samples = [*_SAMPLES, *_SAMPLES]
    plan = _plan([[[0]], [[1]]], [[[2], [3]], []])
    weights = token_weights(samples, plan, reduction="bnpo", max_completion_tokens=10)
    assert weights == pytest.approx([1 / 3, 1 / 9, 1 / 12, 1 / 12])
