"""Tensors of micro-batches."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import EMPTY_ROW_TOKENS, BatchPlan, MicroBatchPlan, plan_batch
from grpo_async.records import RolloutSample
from tests.support.records import make_sample

TRAINER_VERSION = 4


def _pack(samples: list[RolloutSample], weights: list[float], plan: BatchPlan) -> list[list[MicroBatch]]:
    """Of each rank, whose part has been on its way to another process."""
    parts = split_by_rank(samples, weights, plan, trainer_version=TRAINER_VERSION)
    return [pickle.loads(pickle.dumps(part)).pack() for part in parts]


def test_a_row_points_each_trained_token_at_the_state_before_it() -> None:
    samples = [
        make_sample(prompt=[1, 2], completion=[5, 6], version=3),
        make_sample(prompt=[9], completion=[8]),
        make_sample(prompt=[1, 2], completion=[7]),
    ]
    plan = plan_batch([4, 2, 3], world_size=1, micro_batch_tokens=9, pack=True)
    (batch,) = _pack(samples, [0.25, 0.5, 1.0], plan)[0]
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 1, 2, 7, 9, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.source_index.tolist() == [1, 2, 5, 7]
    assert batch.target_ids.tolist() == [5, 6, 7, 8]
    assert batch.sample_index.tolist() == [0, 0, 1, 2]
    assert batch.weights.tolist() == [0.25, 0.25, 1.0, 0.5]
    assert batch.staleness.tolist() == [1, 1, 4, 4]


def _samples(draw: random.Random) -> list[RolloutSample]:
    """Groups with one prompt; completions of several turns, some without a sampled token."""
    samples = []
    for group_id in range(draw.randint(1, 6)):
        prompt = [draw.randrange(100) for _ in range(draw.randint(1, 9))]
        for _ in range(draw.choice([1, 4])):
            length = draw.randint(1, 12)
            chance = draw.choice([0.0, 0.5, 1.0])
            mask = [False] * len(prompt) + [draw.random() < chance for _ in range(length)]
            sample = RolloutSample(
                group_id=group_id,
                rollout_id=str(len(samples)),
                token_ids=prompt + [draw.randrange(100) for _ in range(length)],  # type: ignore[arg-type]
                loss_mask=mask,  # type: ignore[arg-type]
                sampler_logprobs=[-draw.random() if sampled else 0.0 for sampled in mask],  # type: ignore[arg-type]
                policy_versions=[draw.randrange(5) if sampled else -1 for sampled in mask],  # type: ignore[arg-type]
                advantage=draw.gauss(0.0, 1.0),
                rewards={},
                reward=None,
                truncated=False,
            )
            samples.append(sample)
    return samples


def _slowly(samples: list[RolloutSample], weights: list[float], plan: MicroBatchPlan) -> dict[str, Any]:
    """One micro-batch, token by token."""
    rows = max(1, len(plan.rows))
    grid: dict[str, list[list[int]]] = {
        name: [[padding] * plan.row_tokens for _ in range(rows)]
        for name, padding in (("input_ids", 0), ("position_ids", 0), ("segment_ids", -1))
    }
    columns: dict[str, list[float]] = {
        name: []
        for name in (
            "source_index", "target_ids", "sample_index", "sampler_logprobs", "advantages", "weights", "staleness"
        )
    }  # fmt: skip
    num_trained_samples = 0
    for row, indices in enumerate(plan.rows):
        column = 0
        for segment, index in enumerate(indices):
            sample = samples[index]
            mask = sample.loss_mask.tolist()
            for position, token in enumerate(sample.token_ids.tolist()):
                grid["input_ids"][row][column] = token
                grid["position_ids"][row][column] = position
                grid["segment_ids"][row][column] = segment
                if mask[position]:
                    columns["source_index"].append(row * plan.row_tokens + column - 1)
                    columns["target_ids"].append(token)
                    columns["sample_index"].append(num_trained_samples)
                    columns["sampler_logprobs"].append(float(sample.sampler_logprobs[position]))
                    columns["advantages"].append(sample.advantage)
                    columns["weights"].append(weights[index])
                    columns["staleness"].append(TRAINER_VERSION - int(sample.policy_versions[position]))
                column += 1
            num_trained_samples += any(mask)
    return {**grid, **columns}


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_whatever_the_samples_are_packing_gives_what_the_slow_way_gives(world_size: int, pack: bool) -> None:
    """Tool tokens are context but no targets, samples with a trained token are numbered without gaps, unpacked rows are as long as
    the longest, a rank without samples computes padding, and all know the trained tokens of the whole minibatch."""
    draw = random.Random(world_size)
    num_empty = 0
    for _ in range(60):
        samples = _samples(draw)
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_batch(lengths, world_size=world_size, micro_batch_tokens=40, pack=pack)
        weights = [draw.random() for _ in samples]
        ranks = _pack(samples, weights, plan)
        trained = [sum(batch.num_trained_tokens for batch in rank) for rank in ranks]
        assert sum(trained) == sum(sample.num_trained_tokens for sample in samples)
        for rank, plans in zip(ranks, plan.ranks, strict=True):
            for batch, part in zip(rank, plans, strict=True):
                expected = _slowly(samples, weights, part)
                assert batch.minibatch_tokens == sum(trained)
                for name, values in expected.items():
                    tensor = getattr(batch, name)
                    is_float = name in ("sampler_logprobs", "advantages", "weights")
                    assert torch.equal(
                        tensor, torch.tensor(values, dtype=torch.float32 if is_float else torch.int64)
                    ), name
                if not part.indices:
                    assert batch.input_ids.shape == (1, EMPTY_ROW_TOKENS)
                    num_empty += 1
    assert (num_empty > 0) == (world_size > 1), "the cases say little"


def test_a_moved_micro_batch_keeps_what_is_no_tensor_and_what_the_host_reads() -> None:
    (batch,) = _pack(
        [make_sample(completion=[5])], [1.0], plan_batch([3], world_size=1, micro_batch_tokens=8, pack=True)
    )[0]
    moved = batch.to(torch.device("meta"))
    assert moved.minibatch_tokens == 1
    assert moved.weights.device.type == moved.input_ids.device.type == "meta"
    assert moved.segment_ids.device.type == "cpu"
