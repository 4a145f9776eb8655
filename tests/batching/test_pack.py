"""Tensors of micro-batches."""

from __future__ import annotations

import torch

from grpo_async.batching.pack import pack_rank
from grpo_async.batching.plan import EMPTY_ROW_TOKENS, BatchPlan, MicroBatchPlan, plan_batch
from tests.support.records import make_sample


def test_a_packed_row_points_each_trained_token_at_the_state_before_it() -> None:
    samples = [make_sample(prompt=[1, 2], completion=[5, 6], version=3), make_sample(prompt=[7], completion=[8])]
    plan = plan_batch([4, 2], num_ranks=1, micro_batch_tokens=8, pack=True)
    (batch,) = pack_rank(samples, [0.25, 0.5], plan, 0, trainer_version=4)
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert batch.source_index.tolist() == [1, 2, 4]
    assert batch.target_ids.tolist() == [5, 6, 8]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5]
    assert batch.staleness.tolist() == [1, 1, 4]


def test_unpacked_samples_have_rows_of_their_own_as_long_as_the_longest_of_the_micro_batch() -> None:
    samples = [make_sample(prompt=[1, 2], completion=[5, 6]), make_sample(prompt=[7], completion=[8])]
    plan = plan_batch([4, 2], num_ranks=1, micro_batch_tokens=8, pack=False)
    (batch,) = pack_rank(samples, [0.25, 0.5], plan, 0, trainer_version=0)
    assert batch.input_ids.tolist() == [[1, 2, 5, 6], [7, 8, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0], [0, 0, -1, -1]]
    assert batch.source_index.tolist() == [1, 2, 4]
    plan = plan_batch([4, 2], num_ranks=1, micro_batch_tokens=4, pack=False)
    assert [each.input_ids.shape[1] for each in pack_rank(samples, [0.25, 0.5], plan, 0, trainer_version=0)] == [4, 2]


def test_tool_tokens_are_context_but_not_targets() -> None:
    sample = make_sample(prompt=[1], completion=[5, 6, 7])
    masked = type(sample)(
        group_id=0, rollout_id="r", token_ids=[1, 5, 6, 7], loss_mask=[0, 1, 0, 1], sampler_logprobs=[0, -1, 0, -2],
        policy_versions=[-1, 0, -1, 0], advantage=1.0, rewards={}, reward=None, truncated=False,
    )  # fmt: skip
    plan = plan_batch([4], num_ranks=1, micro_batch_tokens=4, pack=True)
    (batch,) = pack_rank([masked], [1.0], plan, 0, trainer_version=0)
    assert batch.target_ids.tolist() == [5, 7]
    assert batch.source_index.tolist() == [0, 2]
    assert batch.sampler_logprobs.tolist() == [-1.0, -2.0]


def test_an_empty_rank_gets_one_short_row_of_padding() -> None:
    sample = make_sample(prompt=[1] * 20, completion=[5] * 20)
    plan = plan_batch([40], num_ranks=2, micro_batch_tokens=40, pack=True)
    empty = pack_rank([sample], [1.0], plan, 1, trainer_version=0)[0]
    assert empty.num_trained_tokens == 0
    assert empty.input_ids.shape == (1, EMPTY_ROW_TOKENS)
    assert torch.equal(empty.segment_ids, torch.full((1, EMPTY_ROW_TOKENS), -1))


def test_samples_with_trained_tokens_are_numbered_without_gaps_in_each_micro_batch() -> None:
    """The middle one has no trained token."""
    nothing = make_sample(prompt=[1, 2], completion=[])
    samples = [make_sample(prompt=[1], completion=[5, 6]), nothing, make_sample(prompt=[1], completion=[7, 8])]
    for rows in ([[0, 1, 2]], [[0, 1], [2]]):
        plan = BatchPlan(ranks=[[MicroBatchPlan(rows=rows, row_tokens=8), MicroBatchPlan(rows=[[2]], row_tokens=3)]])
        first, second = pack_rank(samples, [0.1, 0.2, 0.3], plan, 0, trainer_version=0)
        assert first.sample_index.tolist() == [0, 0, 1, 1]
        assert second.sample_index.tolist() == [0, 0]


def test_every_micro_batch_knows_the_trained_tokens_of_the_whole_minibatch() -> None:
    samples = [make_sample(completion=[5]), make_sample(completion=[5, 6, 7])]
    plan = plan_batch([3, 5], num_ranks=3, micro_batch_tokens=8, pack=True)
    batches = [pack_rank(samples, [1.0, 1.0], plan, rank, trainer_version=0)[0] for rank in range(3)]
    assert [batch.minibatch_tokens for batch in batches] == [4, 4, 4]
    assert sorted(batch.num_trained_tokens for batch in batches) == [0, 1, 3]
    moved = batches[0].to(torch.device("meta"))
    assert moved.minibatch_tokens == 4
    assert moved.weights.device.type == moved.input_ids.device.type == "meta"
