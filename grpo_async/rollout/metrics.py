"""Metrics of the groups that one optimizer step consumed, under the names that users of TRL know. Pure.

Every mean is over the values that exist; nothing is filled with 0, with three exceptions: a completion without calls counts as
0 calls, the failure frequency of no calls is 0 (as in TRL), and so is the standard deviation of a single value.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from grpo_async.records import RolloutCompletion, ScoredGroup
from grpo_async.scoring.advantages import has_zero_variance, rewards_by_name, sample_std, scored_rewards

_PERCENTS = (10, 50, 90)


def group_metrics(groups: Sequence[ScoredGroup], *, pass_threshold: float = 1.0) -> dict[str, float]:
    """Rewards, lengths and truncation over all scored groups of a step: trained, filtered or stale, as in the rollout store."""
    metrics: dict[str, float] = {}
    rewards = [reward for group in groups for reward in scored_rewards(group.rewards)]
    if rewards:
        metrics["reward"] = fmean(rewards)
        metrics["reward_std"] = sample_std(rewards)
        metrics["reward_min"], metrics["reward_max"] = min(rewards), max(rewards)
        metrics.update({f"reward_p{percent}": value for percent, value in _quantiles(rewards).items()})
        scored = [group.rewards for group in groups if scored_rewards(group.rewards)]
        metrics["frac_reward_zero_std"] = fmean(map(has_zero_variance, scored))
    for source in sorted({group.group.prompt.source for group in groups if group.group.prompt.source is not None}):
        mine = [group for group in groups if group.group.prompt.source == source]
        metrics.update(_source_metrics(source, mine, pass_threshold))
    parts = [part for group in groups for part in group.reward_parts]
    for name, values in sorted(rewards_by_name(parts).items()):
        metrics[f"rewards/{name}/mean"] = fmean(values)
        metrics[f"rewards/{name}/std"] = sample_std(values)
    for name in sorted({name for group in groups for name in group.metrics}):
        metrics[name] = fmean(group.metrics[name] for group in groups if name in group.metrics)
    advantages = [abs(sample.advantage) for group in groups for sample in group.samples]
    if advantages:
        metrics["advantage/abs_mean"] = fmean(advantages)
    ended = [c for group in groups for c in group.group.completions if c.status.is_trainable]
    if ended:  # includes those without a token: a prompt that was too long is truncated
        metrics["completions/clipped_ratio"] = fmean(float(completion.truncated) for completion in ended)
    completions = [completion for group in groups for completion in group.group.trainable]
    if completions:
        metrics.update(_completion_metrics(completions))
    return metrics


def _source_metrics(source: str, groups: Sequence[ScoredGroup], pass_threshold: float) -> dict[str, float]:
    """Of one of several sources of prompts."""
    metrics = {f"source/{source}/num_groups": float(len(groups))}
    scored = [rewards for group in groups if (rewards := scored_rewards(group.rewards))]
    if scored:
        every = [reward for rewards in scored for reward in rewards]
        metrics[f"source/{source}/reward"] = fmean(every)
        metrics[f"source/{source}/solved"] = fmean(reward >= pass_threshold for reward in every)
        metrics[f"source/{source}/frac_reward_zero_std"] = fmean(map(has_zero_variance, scored))
    lengths = [completion.num_sampled_tokens for group in groups for completion in group.group.trainable]
    if lengths:
        metrics[f"source/{source}/mean_length"] = fmean(lengths)
    return metrics


def _completion_metrics(completions: Sequence[RolloutCompletion]) -> dict[str, float]:
    lengths = [float(completion.num_sampled_tokens) for completion in completions]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        **{f"completions/p{percent}_length": value for percent, value in _quantiles(lengths).items()},
        "rollout/duration_s": fmean(completion.total_duration_s for completion in completions),
        "rollout/num_turns": fmean(float(len(completion.all_turns)) for completion in completions),
        "rollout/done": fmean(float(completion.done) for completion in completions),
    }
    measured = [t.generation_duration_s for c in completions for t in c.all_turns if t.generation_duration_s > 0.0]
    if measured:  # a custom rollout function does not report durations
        metrics["rollout/generation_duration_s"] = fmean(measured)
    ended = [float(c.num_sampled_tokens) for c in completions if not c.truncated]
    if ended:
        metrics["completions/mean_terminated_length"] = fmean(ended)
        metrics["completions/min_terminated_length"] = min(ended)
        metrics["completions/max_terminated_length"] = max(ended)
    metrics.update(_tool_metrics([completion for completion in completions if completion.tool_names]))
    return metrics


def _tool_metrics(completions: Sequence[RolloutCompletion]) -> dict[str, float]:
    """Tool metrics over the completions that were offered tools, of all calls and for each tool. How long an agent's calls
    took, and which failed, is not known."""
    if not completions:
        return {}
    turns = [turn for completion in completions for turn in completion.all_turns]
    calls = [call for turn in turns for call in turn.tool_calls]
    metrics = {
        "tools/call_frequency": len(calls) / len(completions),
        "tools/parse_error_frequency": fmean(float(turn.parse_error is not None) for turn in turns),
    }
    failed = [call.failed for call in calls if call.failed is not None]
    is_known = len(failed) == len(calls)
    if is_known:
        metrics["tools/failure_frequency"] = sum(failed) / max(len(failed), 1)
    if calls and is_known:
        metrics["tools/duration_s/mean"] = fmean(call.duration_s for call in calls)
        metrics["tools/duration_s/per_rollout"] = sum(call.duration_s for call in calls) / len(completions)
    offered = {name for completion in completions for name in completion.tool_names}
    # names that a policy makes up share one metric, since their number has no limit
    for name in [*sorted(offered), "unknown"]:
        mine = [call for call in calls if (call.name if call.name in offered else "unknown") == name]
        if mine:
            metrics[f"tools/{name}/call_frequency"] = len(mine) / len(completions)
            if is_known:
                metrics[f"tools/{name}/failure_frequency"] = fmean(bool(call.failed) for call in mine)
                metrics[f"tools/{name}/duration_s"] = fmean(call.duration_s for call in mine)
    return metrics


def _quantiles(values: Sequence[float]) -> dict[int, float]:
    """By linear interpolation: [1, 2, 4, 9] -> p10 at place 0.1 x 3: 1.3; p50 at 1.5: 3; p90 at 2.7: 7.5."""
    return dict(zip(_PERCENTS, np.percentile(values, _PERCENTS).tolist(), strict=True))
