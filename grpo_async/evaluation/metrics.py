"""The numbers of an evaluation, over all of its prompts and over the parts of the data. Pure.

A completion that failed, or that no reward scored, takes part in no mean of rewards and in no pass@k; both are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from grpo_async.config.sections import powers_up_to
from grpo_async.records import RolloutStatus, ScoredGroup
from grpo_async.scoring.advantages import sample_std
from grpo_async.scoring.answers import read_answer
from grpo_async.scoring.pass_at_k import Vote, majority_at_k, pass_at_k

_MIN_ANSWERED = 0.5
"""majority@k is left out where an answer can be read in fewer of the completions: it would say how rarely one can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """`metrics` are over all prompts; `by_group` has those of each value of `evaluation.group_by`, empty without it.
    `prompt_rewards`: the mean reward of each prompt, in the order of the data, None where none of its completions has one: two
    evaluations of the same prompts are compared by them. `completions`: rows of a table for people, of the first prompts one each:
    step, prompt, completion, reward, rewards/NAME."""

    metrics: dict[str, float]
    by_group: dict[str, dict[str, float]] = field(default_factory=dict)
    prompt_rewards: list[float | None] = field(default_factory=list)
    completions: Sequence[Mapping[str, str | float | None]] = ()

    def flat(self) -> dict[str, float]:
        """See `flat_metrics`."""
        return flat_metrics(self.metrics, self.by_group)


def flat_metrics(metrics: Mapping[str, float], by_group: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """{"reward": 0.5} and {"gsm8k": {"reward": 0.25}} -> {"reward": 0.5, "reward/gsm8k": 0.25}."""
    parts = {f"{name}/{group}": value for group, each in by_group.items() for name, value in each.items()}
    return {**metrics, **parts}


def evaluation_result(
    prompts: Sequence[ScoredGroup], *, group_by: str | None, samples: int, pass_threshold: float, duration_s: float
) -> EvaluationResult:
    """All numbers of one evaluation with `samples` completions per prompt, over at least one prompt.

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
    if group_by is not None:
        for prompt in prompts:
            parts.setdefault(str(prompt.group.prompt.columns[group_by]), []).append(prompt)
    by_group = {
        value: prompt_metrics(parts[value], samples=samples, pass_threshold=pass_threshold) for value in sorted(parts)
    }
    means = [fmean(rewards) if (rewards := _rewards(prompt)) else None for prompt in prompts]
    return EvaluationResult(metrics=metrics, by_group=by_group, prompt_rewards=means)


def prompt_metrics(prompts: Sequence[ScoredGroup], *, samples: int, pass_threshold: float) -> dict[str, float]:
    """Numbers of some prompts. A completion passes when its reward is at least `pass_threshold`.

    reward, reward_std      mean and standard deviation (ddof = 1) over the completions
    reward_stderr           standard error of the mean over prompts: std of the prompts' means / sqrt(number of prompts)
    pass@k, majority@k      mean over the prompts that have at least k scored completions; see scoring.pass_at_k
    mean@k                  mean over prompts of the mean reward, k = samples
    answered                fraction of the completions in which an answer can be read (scoring.answers)

    Two prompts with two completions each and rewards 1 0 and 0 0: reward 0.25, pass@1 (0.5 + 0) / 2 = 0.25, pass@2 0.5.
    """
    completions = [completion for prompt in prompts for completion in prompt.group.completions]
    rewards = [rewards for prompt in prompts if (rewards := _rewards(prompt))]  # of each prompt that has any
    scored = [reward for each in rewards for reward in each]
    metrics = {"num_prompts": float(len(prompts))}
    if scored:
        metrics["reward"] = fmean(scored)
        metrics["reward_std"] = sample_std(scored)
        means = [fmean(each) for each in rewards]
        metrics["reward_stderr"] = sample_std(means) / math.sqrt(len(means))
        metrics |= _pass_metrics(prompts, means, samples=samples, pass_threshold=pass_threshold)
    parts = [part for prompt in prompts for part in prompt.reward_parts]
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [value for part in parts if (value := part.get(name)) is not None]
        if values:
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


def _rewards(prompt: ScoredGroup) -> list[float]:
    return [reward for reward in prompt.rewards if reward is not None]


def _votes(prompt: ScoredGroup, pass_threshold: float) -> list[Vote]:
    """Of the completions that have a reward."""
    votes = []
    for place, (completion, reward) in enumerate(zip(prompt.group.trainable, prompt.rewards, strict=True)):
        if reward is not None:
            extra = {name: values[place] for name, values in prompt.extra_columns.items()}
            votes.append(Vote(read_answer(completion, extra), reward >= pass_threshold))
    return votes


def _pass_metrics(
    prompts: Sequence[ScoredGroup], means: Sequence[float], *, samples: int, pass_threshold: float
) -> dict[str, float]:
    votes = [_votes(prompt, pass_threshold) for prompt in prompts]
    metrics: dict[str, float] = {}
    for k in powers_up_to(samples):
        if enough := [each for each in votes if len(each) >= k]:
            metrics[f"pass@{k}"] = fmean(pass_at_k(len(each), sum(v.passed for v in each), k) for each in enough)
    if samples == 1:
        return metrics
    metrics[f"mean@{samples}"] = fmean(means)
    metrics["answered"] = fmean(float(vote.answer is not None) for each in votes for vote in each)
    if metrics["answered"] >= _MIN_ANSWERED:
        for k in [k for k in powers_up_to(samples) if k > 2]:  # a vote of one or two is pass@1
            if enough := [each for each in votes if len(each) >= k]:
                metrics[f"majority@{k}"] = fmean(majority_at_k(each, k) for each in enough)
    return metrics
