"""The rows of the rollout store in Python: a group, its rollouts, their turns.

    the rows of one `seq` (schema.COLUMNS) -> GroupRow(RolloutRow(TurnRow...)...)

A row is complete: it holds the texts, the token ids and what training made of them, so that a rollout can be looked at
without the dataset or the model. Field names are the keys of the JSON lines (`lines` writes them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import TypeAdapter

from grpo_async.records import FinishReason, GroupStatus, RolloutStatus, TaggedMessage, ToolCallRecord
from grpo_async.store.schema import SCHEMA

_JSON_COLUMNS = ("messages", "reset_messages", "turns", "branches", "extra")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One generation: its length, when it began (seconds since the epoch, 0.0: not known), its durations in seconds, and the
    tool calls that followed."""

    num_tokens: int
    finish_reason: FinishReason
    generation_duration_s: float
    tool_execution_duration_s: float
    tool_calls: Sequence[ToolCallRecord]
    parse_error: str | None = None
    started_at: float = 0.0
    stop_reason: str | None = None

    @property
    def ended_by(self) -> str:
        """For people: "length", "stop", or with the stop string as Python writes it: "stop '\\\\nQ:'"."""
        return self.finish_reason.value + ("" if self.stop_reason is None else f" {self.stop_reason!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout. `completion_ids`, `mask`, `logprobs` and `versions` have equal length.

    Where the mask is 0 (tool and environment tokens) the logprob is 0.0 and the version -1. `reward` and `advantage`
    are None for a rollout that was never scored. Numbers that are not finite are None.

    `trainer_logprobs`, `proximal_logprobs`, `weights`, `entropies` (nats) and `token_flags` (records.TokenFlag) are what the
    trainer found: aligned with `completion_ids`, None where the mask is 0; each is None as a whole where the trainer never saw the
    rollout, or `record.rollouts.token_stats` was off.
    """

    rollout_id: str
    status: RolloutStatus
    truncated: bool
    done: bool
    error: str | None
    num_tokens: int  # sampled by the policy
    reward: float | None
    advantage: float | None
    rewards: Mapping[str, float | None]
    messages: Sequence[TaggedMessage]  # of the completion
    turns: Sequence[TurnRow]
    started_at: float  # seconds since the epoch; 0.0: not known
    total_duration_s: float
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]
    versions: Sequence[int]
    # The prompt, where an environment's reset changed the group's.
    reset_messages: Sequence[TaggedMessage] | None = None
    # What reward functions noted with log_extra, and columns that a rollout function returned; on a clash the former.
    extra: Mapping[str, Any] = field(default_factory=dict)
    trainer_logprobs: Sequence[float | None] | None = None
    proximal_logprobs: Sequence[float | None] | None = None
    weights: Sequence[float | None] | None = None
    entropies: Sequence[float | None] | None = None
    token_flags: Sequence[int | None] | None = None
    branches: Sequence[RolloutRow] = ()
    """Further paths of an agent that changed its history, as if each were a rollout: "g7-r0.b1" of the rollout "g7-r0"."""
    parent: str | None = None
    """The path whose beginning this one shares, if this is a branch."""

    @property
    def paths(self) -> list[RolloutRow]:
        """The rollout's own path, then its branches."""
        return [self, *self.branches]

    @property
    def sampled_versions(self) -> set[int]:
        """Policy versions that sampled its tokens."""
        return {version for version, mask in zip(self.versions, self.mask, strict=True) if mask}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group. `step` is the optimizer step that used or dropped it, if any; `seq` numbers the groups of a store in the order
    of writing; `prompt_hash` is the same for the same prompt in every step and run."""

    schema: int
    seq: int
    group_id: int
    prompt_id: int
    step: int | None
    status: GroupStatus
    written_at: float  # seconds since the epoch: when the group was finalized
    prompt_hash: str
    messages: Sequence[TaggedMessage]  # of the prompt
    columns: Mapping[str, Any]
    rollouts: Sequence[RolloutRow]

    def path(self, rollout_id: str) -> RolloutRow | None:
        """The rollout, or the branch of one, with this id; None: there is none."""
        return next((path for each in self.rollouts for path in each.paths if path.rollout_id == rollout_id), None)


def from_columns(rows: Sequence[Mapping[str, Any]]) -> GroupRow:
    """The group whose rollouts are `rows` (schema.COLUMNS), in their order: every row of one `seq`."""
    first = rows[0]
    content = {
        **first,
        "schema": SCHEMA,
        "status": first["group_status"],
        "messages": orjson.loads(first["prompt_messages"]),
        "columns": orjson.loads(first["columns"]),
        "rollouts": [_rollout_from(row) for row in rows if row["rollout_index"] is not None],
    }
    return _GROUP.validate_python(content)


def _rollout_from(row: Mapping[str, Any]) -> dict[str, Any]:
    content = {**row, "started_at": row["started_at"] or 0.0}
    content |= {name: None if row[name] is None else orjson.loads(row[name]) for name in _JSON_COLUMNS}
    shared = {name: row[name] for name in ("status", "truncated", "done", "error", "rewards", "total_duration_s")}
    content["branches"] = [
        {**shared, "started_at": min((turn["started_at"] for turn in each["turns"]), default=0.0), **each}
        for each in content["branches"] or ()
    ]
    return content


_GROUP = TypeAdapter(GroupRow)
