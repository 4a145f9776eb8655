"""The metrics of an evaluation, over all of its prompts and over parts of the data. Pure.

A completion that failed, or that no reward scored, is left out of means of rewards and of pass@k; both kinds are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from grpo_async.config.sections import powers_up_to
from grpo_async.records import RolloutStatus, ScoredGroup
from grpo_async.scoring.advantages import rewards_by_name, sample_std, scored_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """`metrics` are over all prompts; `by_group` has those of each value of `evaluation.group_by`, without it of each source;
    empty if there is one.
    `prompt_rewards`: the mean reward of each prompt, in the order of the data, None if none of its completions has one. Two
    evaluations of the same prompts are compared by them. `completions`: rows of a table for people, one for each of the first
    prompts: step, prompt, completion, reward, rewards/NAME."""

    metrics: dict[str, float]
    by_group: dict[str, dict[str, float]] = field(default_factory=dict)
    prompt_rewards: list[float | None] = field(default_factory=list)
    completions: Sequence[Mapping[str, str | float | None]] = ()


def flat_metrics(metrics: Mapping[str, float], by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """{"reward": 0.5} and {"gsm8k": {"reward": 0.25}} -> {"reward": 0.5, "reward/gsm8k": 0.25}."""
    parts = {f"{name}/{group}": value for group, each in by_group.items() for name, value in each.items()}
    return {**metrics, **parts}


def evaluation_result(
    prompts: Sequence[ScoredGroup], *, group_by: str | None, samples: int, pass_threshold: float, duration_s: float
) -> EvaluationResult:
    """All metrics of one evaluation with `samples` completions per prompt, over at least one prompt.

    `version_min`, `version_max`: the oldest and newest policy version that sampled a token; `mixed` is 1 where they differ.
    """
    metrics = prompt_metrics(prompts, samples=samples, pass_threshold=pass_threshold)
    completions = [completion for prompt in prompts for completion in prompt.group.completions]
    sampled = [turn.policy_versions for completion in completions for turn in completion.all_turns]
    versions = [version for each in sampled if each.size for version in (each.min(), each.max())]
    if versions:
        oldest, newest = float(min(versions)), float(max(versions))
        metrics |= {"version_min": oldest, "version_max": newest, "mixed": float(oldest != newest)}
    metrics["duration_s"] = duration_s
    parts: dict[str, list[ScoredGroup]] = {}
    for prompt in prompts:
        given = prompt.group.prompt
        value = given.source if group_by is None else str(given.columns[group_by])
        if value is not None:
            parts.setdefault(value, []).append(prompt)
    by_group = {
        value: prompt_metrics(parts[value], samples=samples, pass_threshold=pass_threshold) for value in sorted(parts)
    }
    means = [fmean(rewards) if (rewards := scored_rewards(prompt.rewards)) else None for prompt in prompts]
    return EvaluationResult(metrics=metrics, by_group=by_group, prompt_rewards=means)


def prompt_metrics(prompts: Sequence[ScoredGroup], *, samples: int, pass_threshold: float) -> dict[str, float]:
    """Metrics of some prompts. A completion passes when its reward is at least `pass_threshold`.

    reward, reward_std      mean and standard deviation (ddof = 1) over the completions
    reward_stderr           standard error of the mean over prompts: std of the prompts' means / sqrt(number of prompts)
    pass@k                  mean over the prompts that have at least k scored completions; see `pass_at_k`
    mean@k                  mean over prompts of the mean reward, k = samples

    Two prompts with two completions each and rewards 1 0 and 0 0: reward 0.25, pass@1 (0.5 + 0) / 2 = 0.25, pass@2 0.5.
    """
    completions = [completion for prompt in prompts for completion in prompt.group.completions]
    rewards = list(filter(None, (scored_rewards(prompt.rewards) for prompt in prompts)))  # of each prompt that has some
    scored = [reward for each in rewards for reward in each]
    metrics = {"num_prompts": float(len(prompts))}
    if scored:
        metrics["reward"] = fmean(scored)
        metrics["reward_std"] = sample_std(scored)
        means = [fmean(each) for each in rewards]
        metrics["reward_stderr"] = sample_std(means) / math.sqrt(len(means))
        for k in powers_up_to(samples):
            if enough := [each for each in rewards if len(each) >= k]:
                passed = ((len(each), sum(reward >= pass_threshold for reward in each)) for each in enough)
                metrics[f"pass@{k}"] = fmean(pass_at_k(*counts, k) for counts in passed)
        if samples > 1:
            metrics[f"mean@{samples}"] = fmean(means)
    for name, values in rewards_by_name([part for prompt in prompts for part in prompt.reward_parts]).items():
        metrics[f"rewards/{name}"] = fmean(values)
    sampled = [completion for completion in completions if completion.num_sampled_tokens]
    if sampled:
        metrics["mean_length"] = fmean(completion.num_sampled_tokens for completion in sampled)
        metrics["num_turns"] = fmean(len(completion.all_turns) for completion in sampled)
    if completions:
        metrics["truncated"] = fmean(float(completion.truncated) for completion in completions)
    num_failed = sum(completion.status is RolloutStatus.FAILED for completion in completions)
    counts = {"num_failed": num_failed, "num_unscored": len(completions) - len(scored) - num_failed}
    return metrics | {name: float(count) for name, count in counts.items() if count}


def pass_at_k(num_completions: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k (Chen et al., arXiv 2107.03374, equation 1), the chance that one of k completions passes:
    the fraction of the subsets of k that have one that passes,

        1 - C(n - c, k) / C(n, k)        n = num_completions, c = num_passed

    4 completions of which 1 passes: k = 1: 1 - 3/4 = 0.25; k = 2: 1 - 3/6 = 0.5; k = 4: 1 - 0/1 = 1. The plain estimate
    1 - (1 - c/n)^k would say 0.4375 for k = 2."""
    if not 0 <= num_passed <= num_completions or not 1 <= k <= num_completions:
        raise ValueError(f"pass@{k} of {num_completions} completions with {num_passed} that pass is not defined")
    return 1.0 - math.comb(num_completions - num_passed, k) / math.comb(num_completions, k)
