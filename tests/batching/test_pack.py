"""Tensors of micro-batches."""

from __future__ import annotations

import pickle
from dataclasses import replace

from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import EMPTY_ROW_TOKENS, BatchPlan, MicroBatchPlan, plan_batch
from grpo_async.batching.prefixes import prefix_order
from grpo_async.records import RolloutSample
from tests.support.records import make_sample

TRAINER_VERSION = 4


def _pack(samples: list[RolloutSample], weights: list[float], plan: BatchPlan) -> list[list[MicroBatch]]:
    """Of each rank, whose part has been on its way to another process."""
    parts = split_by_rank(samples, weights, plan, trainer_version=TRAINER_VERSION)
    return [pickle.loads(pickle.dumps(part)).pack() for part in parts]


def test_a_row_has_a_shared_prefix_once_and_points_each_trained_token_at_the_state_before_it() -> None:
    samples = [
        make_sample(prompt=[1, 2], completion=[5, 6], version=3),
        make_sample(prompt=[9], completion=[8]),
        make_sample(prompt=[1, 2], completion=[7]),
    ]
    prefixes = prefix_order([sample.token_ids for sample in samples])
    plan = plan_batch([4, 2, 3], world_size=1, micro_batch_tokens=9, pack=True, prefixes=prefixes)
    (batch,) = _pack(samples, [0.25, 0.5, 1.0], plan)[0]
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 7, 9, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert batch.segments == [(4, 0), (1, 2), (2, 0)]
    assert batch.source_index.tolist() == [1, 2, 1, 5]
    assert batch.target_ids.tolist() == [5, 6, 7, 8]
    assert batch.sample_index.tolist() == [0, 0, 1, 2]
    assert batch.weights.tolist() == [0.25, 0.25, 1.0, 0.5]
    assert batch.staleness.tolist() == [1, 1, 4, 4]


def test_unpacked_rows_are_padded_tool_tokens_are_no_targets_and_a_rank_without_samples_computes_padding() -> None:
    """Of three samples the second has no trained token; numbers of samples have no gaps."""
    first = replace(make_sample(prompt=[1], completion=[5, 6, 7]), loss_mask=[0, 1, 0, 1])
    second = replace(make_sample(prompt=[1], completion=[8]), loss_mask=[0, 0])
    third = make_sample(prompt=[1], completion=[9], advantage=-2.0)
    rows = MicroBatchPlan(rows=[[0], [1], [2]], row_tokens=4)
    empty = MicroBatchPlan(rows=[], row_tokens=EMPTY_ROW_TOKENS)
    [[batch], [nothing]] = _pack([first, second, third], [1.0, 1.0, 1.0], BatchPlan(ranks=[[rows], [empty]]))
    assert batch.input_ids.tolist() == [[1, 5, 6, 7], [1, 8, 0, 0], [1, 9, 0, 0]]
    assert [length for length, _ in batch.segments] == [4, 2, 2, 2, 2]  # a sample, or its padding
    assert batch.source_index.tolist() == [0, 2, 8]
    assert batch.target_ids.tolist() == [5, 7, 9]
    assert batch.sample_index.tolist() == [0, 0, 1]
    assert batch.advantages.tolist() == [1.0, 1.0, -2.0]
    assert nothing.input_ids.shape == (1, EMPTY_ROW_TOKENS)
    assert batch.minibatch_tokens == nothing.minibatch_tokens == 3
