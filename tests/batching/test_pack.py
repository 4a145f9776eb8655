"""Tensors of micro-batches."""

from __future__ import annotations

import pytest
import torch

from grpo_async.batching.pack import pack_rank, token_weights
from grpo_async.batching.plan import plan_batch
from tests.support.records import make_sample


def test_a_packed_row_points_each_trained_token_at_the_state_before_it() -> None:
    samples = [make_sample(prompt=[1, 2], completion=[5, 6], version=3), make_sample(prompt=[7], completion=[8])]
    plan = plan_batch([4, 2], num_ranks=1, micro_batch_tokens=8, row_tokens=8, pack=True)
    (batch,) = pack_rank(samples, [0.25, 0.5], plan, 0, trainer_version=4)
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 7, 8, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1, -1, -1]]
    assert batch.source_index.tolist() == [1, 2, 4]
    assert batch.target_ids.tolist() == [5, 6, 8]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5]
    assert batch.staleness.tolist() == [1, 1, 4]


def test_the_mask_is_causal_within_a_sample_and_closed_between_samples() -> None:
    samples = [make_sample(prompt=[1], completion=[5]), make_sample(prompt=[7], completion=[8])]
    plan = plan_batch([2, 2], num_ranks=1, micro_batch_tokens=5, row_tokens=5, pack=True)
    (batch,) = pack_rank(samples, [0.5, 0.5], plan, 0, trainer_version=0)
    assert batch.attention_mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],  # padding sees itself: no row of the softmax is empty
    ]


def test_tool_tokens_are_context_but_not_targets() -> None:
    sample = make_sample(prompt=[1], completion=[5, 6, 7])
    masked = type(sample)(
        group_id=0, rollout_id="r", token_ids=[1, 5, 6, 7], loss_mask=[0, 1, 0, 1], sampler_logprobs=[0, -1, 0, -2],
        policy_versions=[-1, 0, -1, 0], advantage=1.0, rewards={}, reward=None, truncated=False,
    )  # fmt: skip
    plan = plan_batch([4], num_ranks=1, micro_batch_tokens=4, row_tokens=None, pack=True)
    (batch,) = pack_rank([masked], [1.0], plan, 0, trainer_version=0)
    assert batch.target_ids.tolist() == [5, 7]
    assert batch.source_index.tolist() == [0, 2]
    assert batch.sampler_logprobs.tolist() == [-1.0, -2.0]


def test_an_empty_rank_gets_one_row_of_padding() -> None:
    plan = plan_batch([4], num_ranks=2, micro_batch_tokens=4, row_tokens=None, pack=True)
    empty = pack_rank([make_sample()], [1.0], plan, 1, trainer_version=0)[0]
    assert empty.num_trained_tokens == 0
    assert empty.input_ids.shape == (1, 4)
    assert torch.equal(empty.segment_ids, torch.full((1, 4), -1))


def test_token_weights_follow_the_formulas() -> None:
    """Samples of 1 and 3 trained tokens: dapo 1/4; grpo 1/(2 x 1), 1/(2 x 3); dr_grpo 1/(2 x 10)."""
    samples = [make_sample(completion=[5]), make_sample(completion=[5, 6, 7])]
    weights = {
        name: token_weights(samples, reduction=name, max_completion_tokens=10)  # type: ignore[arg-type]
        for name in ("dapo", "grpo", "dr_grpo")
    }
    assert weights["dapo"] == [0.25, 0.25]
    assert weights["grpo"] == pytest.approx([0.5, 1 / 6])
    assert weights["dr_grpo"] == pytest.approx([0.05, 0.05])
