"""Metrics of the groups that one optimizer step consumed, under the names that users of TRL know. Pure.

Every mean is over the values that exist; nothing is filled with 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from grpo_async.records import RolloutCompletion, ScoredGroup


def group_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards, lengths and truncation over all groups of a step, trained or filtered."""
    metrics: dict[str, float] = {}
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    if rewards:
        metrics["reward"] = fmean(rewards)
        spreads = [_std([r for r in group.rewards if r is not None]) for group in groups]
        metrics["reward_std"] = fmean(spreads)
        metrics["frac_reward_zero_std"] = fmean(float(spread < 1e-9) for spread in spreads)
    for name in sorted({name for group in groups for part in group.reward_parts for name in part}):
        values = [value for group in groups for part in group.reward_parts if (value := part.get(name)) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = fmean(values)
            metrics[f"rewards/{name}/std"] = _std(values)
    for name in sorted({name for group in groups for name in group.metrics}):
        metrics[name] = fmean(group.metrics[name] for group in groups if name in group.metrics)
    completions = [completion for group in groups for completion in group.group.trainable]
    if completions:
        metrics.update(_completion_metrics(completions))
    return metrics


def _completion_metrics(completions: Sequence[RolloutCompletion]) -> dict[str, float]:
    lengths = [float(completion.num_sampled_tokens) for completion in completions]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(float(completion.truncated) for completion in completions),
        "rollout/duration_s": fmean(completion.total_duration_s for completion in completions),
        "rollout/num_turns": fmean(float(len(completion.turns)) for completion in completions),
    }
    ended = [float(c.num_sampled_tokens) for c in completions if not c.truncated]
    if ended:
        metrics["completions/mean_terminated_length"] = fmean(ended)
        metrics["completions/min_terminated_length"] = min(ended)
        metrics["completions/max_terminated_length"] = max(ended)
    return metrics


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation (ddof = 1); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
