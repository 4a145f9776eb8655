"""The numbers of an evaluation, over all of its prompts and over the parts of the data. Pure.

A completion that failed, or that no reward scored, takes part in no mean of rewards and in no pass@k; both are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from grpo_async.config.data_sections import powers_up_to
from grpo_async.scoring.advantages import sample_std
from grpo_async.scoring.pass_at_k import Vote, majority_at_k, pass_at_k

_MIN_ANSWERED = 0.5
"""majority@k is left out where an answer can be read in fewer of the completions: it would say how rarely one can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutcome:
    """What became of one completion. `parts` are the rewards by name; `versions` the oldest and newest policy version that sampled
    one of its tokens, None where none was sampled."""

    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    answer: str | None = None
    num_tokens: int = 0
    num_turns: int = 0
    truncated: bool = False
    error: str | None = None
    """Why it failed; None: it did not."""
    versions: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcomes:
    """The completions of one prompt, in the order of their samples. `group`: the value of the column `evaluation.group_by`."""

    outcomes: Sequence[CompletionOutcome]
    group: str | None = None

    @property
    def scored(self) -> list[tuple[CompletionOutcome, float]]:
        """Those with a reward, and it."""
        return [(outcome, outcome.reward) for outcome in self.outcomes if outcome.reward is not None]


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
    prompts: Sequence[PromptOutcomes], *, samples: int, pass_threshold: float, duration_s: float
) -> EvaluationResult:
    """All numbers of one evaluation with `samples` completions per prompt, over at least one prompt.

    `version_min`, `version_max`: the oldest and newest policy version that sampled a token; `mixed` is 1 where they differ.
    """
    groups = sorted({prompt.group for prompt in prompts if prompt.group is not None})
    versions = [v for prompt in prompts for outcome in prompt.outcomes for v in outcome.versions or ()]
    metrics = prompt_metrics(prompts, samples=samples, pass_threshold=pass_threshold)
    if versions:
        metrics |= {
            "version_min": float(min(versions)),
            "version_max": float(max(versions)),
            "mixed": float(min(versions) != max(versions)),
        }
    metrics["duration_s"] = duration_s
    by_group = {
        group: prompt_metrics([p for p in prompts if p.group == group], samples=samples, pass_threshold=pass_threshold)
        for group in groups
    }
    means = [fmean(reward for _, reward in prompt.scored) if prompt.scored else None for prompt in prompts]
    return EvaluationResult(metrics=metrics, by_group=by_group, prompt_rewards=means)


def prompt_metrics(prompts: Sequence[PromptOutcomes], *, samples: int, pass_threshold: float) -> dict[str, float]:
    """Numbers of some prompts. A completion passes when its reward is at least `pass_threshold`.

    reward, reward_std      mean and standard deviation (ddof = 1) over the completions
    reward_stderr           standard error of the mean over prompts: std of the prompts' means / sqrt(number of prompts)
    pass@k, majority@k      mean over the prompts that have at least k scored completions; see scoring.pass_at_k
    mean@k                  mean over prompts of the mean reward, k = samples
    answered                fraction of the completions in which an answer can be read (scoring.answers)

    Two prompts with two completions each and rewards 1 0 and 0 0: reward 0.25, pass@1 (0.5 + 0) / 2 = 0.25, pass@2 0.5.
    """
    outcomes = [outcome for prompt in prompts for outcome in prompt.outcomes]
    scored = [pair for prompt in prompts for pair in prompt.scored]
    num_failed = sum(outcome.error is not None for outcome in outcomes)
    metrics = {"num_prompts": float(len(prompts))}
    if scored:
        metrics["reward"] = fmean(reward for _, reward in scored)
        metrics["reward_std"] = sample_std([reward for _, reward in scored])
        means = [fmean(reward for _, reward in prompt.scored) for prompt in prompts if prompt.scored]
        metrics["reward_stderr"] = sample_std(means) / math.sqrt(len(means))
        metrics |= _pass_metrics(prompts, means, samples=samples, pass_threshold=pass_threshold)
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.parts):
        values = [value for outcome in outcomes if (value := outcome.parts.get(name)) is not None]
        if values:
            metrics[f"rewards/{name}"] = fmean(values)
    sampled = [outcome for outcome in outcomes if outcome.num_tokens]
    if sampled:
        metrics["mean_length"] = fmean(outcome.num_tokens for outcome in sampled)
        metrics["num_turns"] = fmean(outcome.num_turns for outcome in sampled)
    if outcomes:
        metrics["truncated"] = fmean(float(outcome.truncated) for outcome in outcomes)
    counts = {"num_failed": num_failed, "num_unscored": len(outcomes) - len(scored) - num_failed}
    return metrics | {name: float(count) for name, count in counts.items() if count}


def _pass_metrics(
    prompts: Sequence[PromptOutcomes], means: Sequence[float], *, samples: int, pass_threshold: float
) -> dict[str, float]:
    votes = [
        [Vote(outcome.answer, reward >= pass_threshold) for outcome, reward in prompt.scored] for prompt in prompts
    ]
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
