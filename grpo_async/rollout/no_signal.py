"""Says why a group has nothing to train."""

from __future__ import annotations

from grpo_async.records import ScoredGroup
from grpo_async.scoring.advantages import has_zero_variance


def why_no_signal(scored: ScoredGroup | None) -> str:
    """Why a group had nothing to train; None: no token of it was sampled."""
    if scored is None:
        return "no token was sampled: its prompt is too long, or its environment was done at once"
    rewards = [reward for reward in scored.rewards if reward is not None]
    if len(rewards) < 2:
        return "it was not scored"
    if has_zero_variance(scored.rewards):
        calls = [call for c in scored.group.trainable for turn in c.turns for call in turn.tool_calls]
        if calls and all(call.failed for call in calls):
            return f"all rewards are {rewards[0]:g}, and every tool call failed: {calls[-1].name}: {calls[-1].result[:200]}"
        return (
            f"all rewards are {rewards[0]:g}: the task is solved, too hard for this policy, or the policy has collapsed"
        )
    return (
        "all its completions were truncated, and rollout.overlong is mask: rollout.max_completion_tokens may be too low"
    )
