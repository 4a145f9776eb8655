"""Prefixes that samples share: found in their token ids, computed once, and planned for all ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import BatchPlan, plan_batch
from grpo_async.batching.prefixes import prefix_order
from tests.support.records import make_sample
from tests.support.trees import random_tree

LIMIT = 60


def _plan(samples: Sequence[Sequence[int]], world_size: int, limit: int = LIMIT) -> BatchPlan:
    prefixes = prefix_order([np.array(ids, np.int32) for ids in samples])
    lengths = [len(ids) for ids in samples]
    return plan_batch(lengths, world_size=world_size, micro_batch_tokens=limit, pack=True, prefixes=prefixes)


def _distinct(samples: Sequence[Sequence[int]]) -> int:
    return len({tuple(ids[: end + 1]) for ids in samples for end in range(len(ids))})


def test_every_distinct_prefix_of_a_micro_batch_is_computed_once_and_leads_to_its_tokens() -> None:
    """200 random trees, on up to three ranks."""
    for case in range(200):
        chance = random.Random(case)
        samples = random_tree(chance, chance.randint(1, 12))
        plan = _plan(samples, chance.randint(1, 3))
        forwards = [each for rank in plan.ranks for each in rank]
        assert sorted(index for each in forwards for index in each.indices) == list(range(len(samples)))
        assert len({len(rank) for rank in plan.ranks}) == 1
        rows = [make_sample(prompt=ids[:1], completion=ids[1:]) for ids in samples]
        parts = split_by_rank(rows, [1.0] * len(rows), plan, trainer_version=0)
        batches = [batch for part in parts for batch in part.pack()]
        for forward, batch in zip(forwards, batches, strict=True):
            members = [samples[index] for index in forward.indices]
            if members:
                assert forward.num_computed_tokens == batch.input_ids.numel() == _distinct(members) <= LIMIT
                _assert_leads_to(batch, members)


def _assert_leads_to(batch: MicroBatch, members: Sequence[Sequence[int]]) -> None:
    """Walk the segments: the tokens before each trained token, and its place, are those of its sample."""
    flat, positions = batch.input_ids.flatten().tolist(), batch.position_ids.flatten().tolist()
    before: list[list[int]] = []  # what each token sees, itself included
    path: list[int] = []
    for segment in batch.segments:
        path = path[: segment.shared]
        for _ in range(segment.length):
            path = [*path, flat[len(before)]]
            before.append(path)
    assert [len(each) - 1 for each in before] == positions
    wanted = [(ids[:end], ids[end]) for ids in members for end in range(1, len(ids))]
    assert [
        (before[s], t) for s, t in zip(batch.source_index.tolist(), batch.target_ids.tolist(), strict=True)
    ] == wanted


@pytest.mark.parametrize(
    ("world_size", "limit", "wanted"),
    [
        pytest.param(1, 1000, [220], id="together"),
        pytest.param(2, 1000, [110, 110], id="one group for each rank"),
        pytest.param(4, 1000, [70, 70, 70, 70], id="a group of four tails for two ranks"),
        pytest.param(1, 110, [110, 110], id="no more than fits"),
        pytest.param(1, 60, [50, 50, 50, 50, 50, 50, 50, 50], id="no two tails fit"),
    ],
)
def test_a_group_stays_together_unless_ranks_would_wait_or_it_does_not_fit(
    world_size: int, limit: int, wanted: list[int]
) -> None:
    """Two groups of four, with a prompt of 30 tokens and 20 tokens each."""
    groups = [[[group] * 30 + [tail] * 20 for tail in range(10, 14)] for group in (1, 2)]
    plan = _plan([ids for group in groups for ids in group], world_size, limit)
    assert sorted(each.num_computed_tokens for rank in plan.ranks for each in rank) == wanted
