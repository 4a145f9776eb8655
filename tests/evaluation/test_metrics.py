"""The numbers of an evaluation, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from grpo_async.config.sections import powers_up_to
from grpo_async.evaluation.metrics import evaluation_result, flat_metrics, pass_at_k, prompt_metrics
from grpo_async.records import RolloutCompletion, RolloutGroup, ScoredGroup
from tests.support.records import make_completion, make_prompt


def _prompt(*rewards: float | None, **columns: str) -> ScoredGroup:
    return _scored([make_completion(f"r{number}") for number in range(len(rewards))], rewards, **columns)


def _scored(completions: Sequence[RolloutCompletion], rewards: Sequence[float | None], **columns: str) -> ScoredGroup:
    group = RolloutGroup(prompt=make_prompt(**columns), completions=completions)
    return ScoredGroup(group=group, samples=[], rewards=rewards, reward_parts=[{} for _ in rewards])


def test_pass_at_k_is_the_fraction_of_the_subsets_in_which_one_passes() -> None:
    """By hand: 4 completions, 1 passes. k = 2: of the C(4, 2) = 6 pairs, C(3, 2) = 3 lack it: 1 - 3/6."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    for n in range(1, 8):
        for c in range(n + 1):
            passed = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(passed, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(4, 1, 5)
    assert [powers_up_to(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_two_prompts_with_four_samples_by_hand() -> None:
    """Rewards 1 0 0 0 and 1 1 0 0. pass@1 (1/4 + 2/4) / 2; pass@2 (1 - 3/6 + 1 - 1/6) / 2 = (1/2 + 5/6) / 2; pass@4 1.
    Means 0.25 and 0.5: standard error 0.25 / sqrt(2) / sqrt(2) = 0.125."""
    metrics = prompt_metrics([_prompt(1, 0, 0, 0), _prompt(1, 1, 0, 0)], samples=4, pass_threshold=1.0)
    assert metrics["reward"] == metrics["mean@4"] == 0.375
    assert metrics["pass@1"] == 0.375
    assert metrics["pass@2"] == pytest.approx(2 / 3)
    assert metrics["pass@4"] == 1.0
    assert metrics["reward_stderr"] == pytest.approx(0.125)
    # 3 ones and 5 zeros: sum of squares 3 - 9/8 = 15/8, / 7
    assert metrics["reward_std"] == pytest.approx(math.sqrt(15 / 8 / 7))


def test_failed_and_unscored_completions_take_part_in_no_mean_and_are_counted() -> None:
    """Rewards 1, None (failed), None (unscored), 0: 2 scored; pass@4 has no prompt with 4."""
    completions = [
        make_completion("r0", ids=(5, 6, 7)),
        make_completion("r1", failed=True, ids=()),
        make_completion("r2", ids=(5, 6, 7, 8, 9)),
        make_completion("r3", ids=(5, 6, 7, 8)),
    ]
    metrics = prompt_metrics([_scored(completions, [1.0, None, 0.0])], samples=4, pass_threshold=1.0)
    assert (metrics["reward"], metrics["pass@2"], metrics["mean_length"]) == (0.5, 1.0, 4.0)
    assert (metrics["num_failed"], metrics["num_unscored"]) == (1.0, 1.0)
    assert "pass@4" not in metrics


def test_each_group_has_its_own_metrics() -> None:
    prompts = [_prompt(1, source="gsm"), _prompt(0, source="gsm"), _prompt(0, source="math")]
    result = evaluation_result(prompts, group_by="source", samples=1, pass_threshold=1.0, duration_s=2.0)
    assert result.metrics["reward"] == pytest.approx(1 / 3)
    assert {group: metrics["reward"] for group, metrics in result.by_group.items()} == {"gsm": 0.5, "math": 0.0}
    flat = flat_metrics(result.metrics, result.by_group)
    assert (flat["reward/gsm"], flat["pass@1/gsm"], flat["duration_s"]) == (0.5, 0.5, 2.0)
    labelled = [
        replace(each, group=replace(each.group, prompt=replace(each.group.prompt, source=label)))
        for each, label in zip(prompts, "aab", strict=True)
    ]
    by_source = evaluation_result(labelled, group_by=None, samples=1, pass_threshold=1.0, duration_s=2.0).by_group
    assert {label: metrics["reward"] for label, metrics in by_source.items()} == {"a": 0.5, "b": 0.0}
