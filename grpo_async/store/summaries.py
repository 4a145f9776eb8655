"""What `RolloutTable` answers with: small frozen records, without tokens and with the beginnings of the texts only.

Texts are as the model, the data and the tools wrote them: whoever shows them escapes them. Durations are seconds, times seconds
since the epoch, entropies nats. None: not known, or there is none (an unscored rollout has no reward).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    status: str  # finished | truncated | failed
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
    clipped_share: float | None
    masked_share: float | None
    mismatch_mean: float | None
    started_at: float | None
    total_duration_s: float | None
    generation_duration_s: float | None
    tool_duration_s: float | None
    written_at: float | None
    superseded: bool
    prompt_preview: str = ""  # the last message of the prompt matters most to a reader: the end, not the beginning
    completion_preview: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """One group: its rollouts taken together."""

    seq: int
    group_id: int
    prompt_id: int
    prompt_hash: str
    step: int | None
    status: str  # trained | filtered | stale | failed | cancelled
    size: int
    num_matching: int  # rollouts of the group that the query holds for
    num_scored: int
    reward_mean: float | None
    reward_std: float | None
    reward_min: float | None
    reward_max: float | None
    num_truncated: int
    num_failed: int
    num_tokens_mean: float
    num_tokens_max: int
    num_turns_mean: float
    num_tool_calls: int
    num_failed_tool_calls: int
    tool_names: Sequence[str]
    version_min: int | None
    version_max: int | None
    staleness: int | None  # the highest
    entropy_mean: float | None
    ratio_max: float | None
    clipped_share: float | None
    masked_share: float | None
    mismatch_mean: float | None
    started_at: float | None  # the earliest
    total_duration_s: float | None  # the longest
    written_at: float | None
    superseded: bool
    prompt_preview: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The matching rollouts of one step; `step` None: those that no step saw."""

    step: int | None
    num_rollouts: int
    num_groups: int
    num_unscored: int
    reward_mean: float | None
    reward_std: float | None
    reward_min: float | None
    reward_q10: float | None
    reward_q25: float | None
    reward_median: float | None
    reward_q75: float | None
    reward_q90: float | None
    reward_max: float | None
    rewards: Mapping[str, float]  # mean of each part that has one
    num_tokens_mean: float
    num_tokens_q10: float
    num_tokens_median: float
    num_tokens_q90: float
    num_tokens_max: int
    truncated_share: float
    failed_share: float
    num_turns_mean: float
    num_tool_calls: int
    num_failed_tool_calls: int
    staleness_mean: float | None
    staleness_max: int | None
    entropy_mean: float | None
    ratio_mean: float | None
    clipped_share: float | None
    masked_share: float | None
    mismatch_mean: float | None
    total_duration_mean_s: float | None
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
    """One prompt that was seen in two steps or more. `change` = last.reward_mean - first.reward_mean."""

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
