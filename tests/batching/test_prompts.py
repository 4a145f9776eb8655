"""Prompts that samples have in common: found, and planned once for each micro-batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from grpo_async.batching.plan import BatchPlan, SamplePrompt, plan_batch
from grpo_async.batching.prompts import find_prompts, num_prompt_tokens
from tests.support.records import make_sample

LIMIT = 120


def _groups(*groups: tuple[int, list[int]]) -> tuple[list[int], list[SamplePrompt | None]]:
    """Tokens of a prompt and of its completions, for each group -> lengths, prompts."""
    lengths: list[int] = []
    prompts: list[SamplePrompt | None] = []
    for number, (num_tokens, completions) in enumerate(groups):
        prompt = SamplePrompt(number=number, num_tokens=num_tokens) if len(completions) > 1 else None
        lengths += [num_tokens + completion for completion in completions]
        prompts += [prompt] * len(completions)
    return lengths, prompts


def _plan(*groups: tuple[int, list[int]], num_ranks: int = 1, limit: int = LIMIT) -> BatchPlan:
    lengths, prompts = _groups(*groups)
    return plan_batch(lengths, num_ranks=num_ranks, micro_batch_tokens=limit, pack=True, prompts=prompts)


def _tokens(plan: BatchPlan) -> list[list[int]]:
    return [[each.num_computed_tokens for each in rank] for rank in plan.ranks]


def test_a_prompt_is_what_comes_before_the_first_trained_token() -> None:
    samples = [
        make_sample(prompt=[1, 2], completion=[5, 6]),
        make_sample(prompt=[1, 2], completion=[7], group_id=1),
        make_sample(prompt=[1], completion=[2, 7]),
        make_sample(prompt=[3], completion=[4]),
    ]
    prompt = SamplePrompt(number=0, num_tokens=2)
    assert find_prompts(samples) == [prompt, prompt, None, None]


def test_of_several_turns_only_what_is_before_the_first_is_shared() -> None:
    one = make_sample(prompt=[1, 2], completion=[5, 6, 7, 8])
    one = replace(one, loss_mask=[0, 0, 1, 0, 0, 1], sampler_logprobs=[0, 0, -1, 0, 0, -1])
    assert num_prompt_tokens(one) == 2
    assert find_prompts([one, one]) == [SamplePrompt(number=0, num_tokens=2)] * 2


def test_samples_without_a_prompt_or_without_a_trained_token_share_nothing() -> None:
    untrained = make_sample(prompt=[1, 2], completion=[])
    no_prompt = make_sample(prompt=[], completion=[5, 6])
    assert num_prompt_tokens(untrained) == num_prompt_tokens(no_prompt) == 0
    assert find_prompts([untrained, untrained, no_prompt, no_prompt]) == [None] * 4


def test_the_worked_example() -> None:
    plan = _plan((3, [2] * 4), (3, [2] * 4), limit=12)
    assert _tokens(plan) == [[11, 11]]
    assert [each.rows for each in plan.ranks[0]] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [each.continues for each in plan.ranks[0]] == [{1: 0, 2: 0, 3: 0}, {5: 4, 6: 4, 7: 4}]
    assert plan.num_shared_tokens == 2 * 3 * 3
    lengths, _ = _groups((3, [2] * 4), (3, [2] * 4))
    assert plan_batch(lengths, num_ranks=1, micro_batch_tokens=12, pack=True).num_micro_batches == 4


def test_a_group_that_is_too_long_for_a_micro_batch_is_divided_and_its_prompt_computed_in_each_part() -> None:
    plan = _plan((20, [30] * 8))
    assert _tokens(plan) == [[20 + 3 * 30, 20 + 3 * 30, 20 + 2 * 30]]
    assert plan.num_shared_tokens == 5 * 20


def test_ranks_with_fewer_groups_than_ranks_divide_them_evenly() -> None:
    assert _tokens(_plan((10, [5] * 8), num_ranks=2)) == [[30], [30]]  # 10 + 4 x 5 each; 50 on one rank
    assert _tokens(_plan((10, [5] * 8), (10, [5] * 8), num_ranks=2)) == [[50], [50]]  # none is divided
    # 3 groups of 10 + 8 x 5: 100 and 50 whole, 80 and 80 with one of them divided
    assert sorted(_tokens(_plan(*[(10, [5] * 8)] * 3, num_ranks=2))) == [[80], [80]]


def test_more_ranks_than_samples_leaves_empty_micro_batches_not_missing_ones() -> None:
    plan = _plan((4, [5, 5]), num_ranks=3)
    assert sorted(sum(len(each.indices) for each in rank) for rank in plan.ranks) == [0, 1, 1]
    assert plan.num_shared_tokens == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_whatever_the_groups_are_nothing_is_lost_counted_wrong_or_beyond_a_limit(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    for _ in range(60):
        groups = [
            (draw.randint(1, 60), [draw.randint(1, 60) for _ in range(draw.choice([1, 2, 8]))])
            for _ in range(draw.randint(1, 9))
        ]
        lengths, prompts = _groups(*groups)
        plan = _plan(*groups, num_ranks=num_ranks)
        forwards = [each for rank in plan.ranks for each in rank]
        assert sorted(index for each in forwards for index in each.indices) == list(range(len(lengths)))
        assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
        assert all(each.num_computed_tokens <= LIMIT for each in forwards)
        saved = 0
        for each in forwards:
            for index, first in each.continues.items():
                prompt = prompts[index]
                assert prompt is not None
                assert prompt == prompts[first]
                assert first not in each.continues
                assert each.indices.index(first) < each.indices.index(index)
                saved += prompt.num_tokens
            numbers = [prompt.number for index in each.indices if (prompt := prompts[index]) is not None]
            if plan.num_shared_tokens > 0:  # one of each has its prompt, all others none
                assert len(each.continues) == len(numbers) - len(set(numbers))
        assert plan.num_shared_tokens == saved
        filled = [each for each in forwards if each.indices]
        assert sum(each.num_computed_tokens for each in filled) == sum(lengths) - saved
        assert plan == _plan(*groups, num_ranks=num_ranks)


def test_long_samples_of_several_ranks_have_even_costs() -> None:
    draw = random.Random(0)
    groups = [(30, [draw.randint(5, 60) for _ in range(8)]) for _ in range(6)]
    ranks = [sum(part) for part in _tokens(_plan(*groups, num_ranks=3))]
    assert max(ranks) <= 1.15 * min(ranks)


def test_a_long_completion_after_a_short_prompt_has_its_own() -> None:
    """4 tokens cost 4 x 16384 + 4^2; the second forward pass of attention (604^2 - 4^2) / 3 = 121600. 8 tokens are worth it."""
    assert _plan((4, [600] * 4), limit=9999).num_shared_tokens == 0
    assert _plan((8, [600] * 4), limit=9999).num_shared_tokens == 3 * 8
    assert (
        _plan((8, [600, 600, 1200]), limit=9999).num_shared_tokens == 8
    )  # the longest has its own, and others take it


def test_prompts_are_not_shared_at_the_price_of_more_forwards() -> None:
    """By length: 3 x (65 + 35), 3 x (35 + 35), 35. Group by group 5 x (35 + 34), and no 65 has room: 8, for 5 tokens saved."""
    plan = _plan((1, [34] * 10), (1, [64] * 3), limit=100)
    assert (plan.num_micro_batches, plan.num_shared_tokens) == (7, 0)


def test_prompts_are_refused_where_samples_are_not_packed() -> None:
    lengths, prompts = _groups((3, [2, 2]))
    with pytest.raises(ValueError, match="only where they are packed"):
        plan_batch(lengths, num_ranks=1, micro_batch_tokens=20, pack=False, prompts=prompts)
