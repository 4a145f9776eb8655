"""What `RolloutTable` returns: small frozen records, without tokens and with the beginnings of the texts only.

Texts are as the model, the data and the tools wrote them: whoever shows them escapes them. Durations are seconds, times seconds
since the epoch, entropies nats. None: not known, or there is none (an unscored rollout has no reward). `Annotated` has the SQL that
computes a value from the rows of a group or a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, get_type_hints

PREVIEW_CHARACTERS = 240
"""Length of `prompt_preview` and `completion_preview`, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many rollouts, and in how many groups."""

    rollouts: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """One rollout without its tokens and messages. The names are those of the columns."""

    seq: int  # of its group: ascending in the order of writing
    rollout_index: int  # in its group, from 0
    rollout_id: str
    group_id: int
    prompt_id: int
    prompt_hash: str
    step: int | None
    group_status: str
    group_size: int
    status: str  # a RolloutStatus
    truncated: bool
    done: bool
    error: str | None
    reward: float | None
    advantage: float | None
    rewards: Mapping[str, float | None]
    group_reward_mean: float | None
    group_reward_std: float | None
    num_prompt_tokens: int
    num_tokens: int
    num_completion_tokens: int
    num_turns: int
    num_tool_calls: int
    num_failed_tool_calls: int
    tool_names: Sequence[str]
    version_min: int | None
    version_max: int | None
    staleness: int | None
    logprob_mean: float | None
    logprob_min: float | None
    entropy_mean: float | None
    ratio_mean: float | None
    ratio_min: float | None
    ratio_max: float | None
    clipped_fraction: float | None
    masked_fraction: float | None
    mismatch_mean: float | None
    started_at: float | None
    total_duration_s: float | None
    generation_duration_s: float | None
    tool_duration_s: float | None
    written_at: float | None
    superseded: bool
    prompt_preview: str = ""  # of the last message of the prompt, which matters most to a reader
    completion_preview: str = ""  # of what the policy wrote, its tool calls too


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """One group: its rollouts taken together."""

    seq: Annotated[int, "seq"]
    group_id: Annotated[int, "any_value(group_id)"]
    prompt_id: Annotated[int, "any_value(prompt_id)"]
    prompt_hash: Annotated[str, "any_value(prompt_hash)"]
    step: Annotated[int | None, "any_value(step)"]
    status: Annotated[str, "any_value(group_status)"]  # a GroupStatus
    size: Annotated[int, "count(rollout_index)::INTEGER"]
    num_matching: int  # rollouts of the group that match the query
    num_scored: Annotated[int, "count(reward)::INTEGER"]
    reward_mean: Annotated[float | None, "any_value(group_reward_mean)"]
    reward_std: Annotated[float | None, "any_value(group_reward_std)"]
    reward_min: Annotated[float | None, "min(reward)"]
    reward_max: Annotated[float | None, "max(reward)"]
    num_truncated: Annotated[int, "count_if(truncated)::INTEGER"]
    num_failed: Annotated[int, "count_if(status = 'failed')::INTEGER"]
    num_tokens_mean: Annotated[float, "coalesce(avg(num_tokens), 0.0)"]
    num_turns_mean: Annotated[float, "coalesce(avg(num_turns), 0.0)"]
    num_tool_calls: Annotated[int, "coalesce(sum(num_tool_calls), 0)::INTEGER"]
    num_failed_tool_calls: Annotated[int, "coalesce(sum(num_failed_tool_calls), 0)::INTEGER"]
    tool_names: Sequence[str]
    version_min: Annotated[int | None, "min(version_min)"]
    version_max: Annotated[int | None, "max(version_max)"]
    staleness: Annotated[int | None, "max(staleness)"]
    entropy_mean: Annotated[float | None, "avg(entropy_mean)"]
    ratio_max: Annotated[float | None, "max(ratio_max)"]
    clipped_fraction: Annotated[float | None, "avg(clipped_fraction)"]
    masked_fraction: Annotated[float | None, "avg(masked_fraction)"]
    mismatch_mean: Annotated[float | None, "avg(mismatch_mean)"]
    started_at: Annotated[float | None, "min(started_at)"]
    total_duration_s: Annotated[float | None, "max(total_duration_s)"]
    written_at: Annotated[float | None, "any_value(written_at)"]
    superseded: Annotated[bool, "any_value(superseded)"]
    prompt_preview: str = ""  # of the first rollout: an environment's reset or an agent may have written it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The matching rollouts of one step; `step` None: those that no step saw."""

    step: Annotated[int | None, "step"]
    num_rollouts: Annotated[int, "count(rollout_index)"]
    num_groups: Annotated[int, "count(DISTINCT seq)"]
    num_unscored: Annotated[int, "count(rollout_index) - count(reward)"]
    reward_mean: Annotated[float | None, "avg(reward)"]
    reward_std: Annotated[float | None, "stddev_samp(reward)"]
    reward_min: Annotated[float | None, "min(reward)"]
    reward_q10: Annotated[float | None, "quantile_cont(reward, 0.1)"]
    reward_q90: Annotated[float | None, "quantile_cont(reward, 0.9)"]
    reward_max: Annotated[float | None, "max(reward)"]
    rewards: Mapping[str, float]  # mean of each part that has one
    num_tokens_mean: Annotated[float, "coalesce(avg(num_tokens), 0.0)"]
    num_tool_calls: Annotated[int, "coalesce(sum(num_tool_calls), 0)::BIGINT"]
    num_failed_tool_calls: Annotated[int, "coalesce(sum(num_failed_tool_calls), 0)::BIGINT"]
    staleness_mean: Annotated[float | None, "avg(staleness)"]
    staleness_max: Annotated[int | None, "max(staleness)"]
    entropy_mean: Annotated[float | None, "avg(entropy_mean)"]
    ratio_mean: Annotated[float | None, "avg(ratio_mean)"]
    clipped_fraction: Annotated[float | None, "avg(clipped_fraction)"]
    masked_fraction: Annotated[float | None, "avg(masked_fraction)"]
    mismatch_mean: Annotated[float | None, "avg(mismatch_mean)"]
    group_statuses: Mapping[str, int]  # groups by status


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """`counts[i]` values lie in [edges[i], edges[i + 1]); the last bin holds its upper edge too. len(edges) = len(counts) + 1;
    both are empty where no value is known. `num_null` rollouts have no value (or none that is finite)."""

    field: str
    edges: Sequence[float]
    counts: Sequence[int]
    num_null: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChange:
    """One prompt that was scored in two groups or more. `change` = last.reward_mean - first.reward_mean."""

    prompt_hash: str
    num_groups: int
    change: float
    first: GroupSummary
    last: GroupSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Extremes:
    """Where to look first. Each list is sorted, the most extreme first."""

    best: Sequence[RolloutSummary]
    worst: Sequence[RolloutSummary]
    improved: Sequence[PromptChange]
    worsened: Sequence[PromptChange]


def sql_of(record: type) -> dict[str, str]:
    """The SQL of every value of GroupSummary or StepSummary that has one, by its name."""
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
