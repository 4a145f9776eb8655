"""The rows of the rollout store in Python: a group, its rollouts, their turns.

    a JSON line, or the rows of one `seq` in Parquet -> GroupRow(RolloutRow(TurnRow...)...)

A row stands for itself: it holds the texts, the token ids and what training made of them, so that a rollout can be looked at
without the data set or the model. Field names are the keys of the JSON lines (`lines` writes them). From a line and from a
sealed block come equal rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from grpo_async.records import FinishReason, GroupStatus, Origin, RolloutStatus, TaggedMessage, ToolCallRecord
from grpo_async.store.schema import SCHEMA

_FLOAT_LISTS = ("logprobs", "trainer_logprobs", "proximal_logprobs", "weights", "entropies")
_JSON_COLUMNS = ("messages", "reset_messages", "turns", "extra")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout. `completion_ids`, `mask`, `logprobs` and `versions` have equal length.

    Where the mask is 0 (tool and environment tokens) the logprob is 0.0 and the version -1. `reward` and `advantage`
    are None for a rollout that was never scored. Numbers that are not finite are None.

    `trainer_logprobs`, `proximal_logprobs`, `weights`, `entropies` (nats) and `marks` (records.TokenMark) are what the trainer
    found: aligned with `completion_ids`, None where the mask is 0; each is None as a whole where the trainer never saw the
    rollout, or `record.rollouts.token_figures` was off.
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
    reset_messages: Sequence[TaggedMessage] | None = (
        None  # the prompt, where an environment's reset changed the group's
    )
    # What reward functions noted with log_extra, and columns that a rollout function returned; on a clash the former.
    extra: Mapping[str, Any] = field(default_factory=dict)
    trainer_logprobs: Sequence[float | None] | None = None
    proximal_logprobs: Sequence[float | None] | None = None
    weights: Sequence[float | None] | None = None
    entropies: Sequence[float | None] | None = None
    marks: Sequence[int | None] | None = None

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
    written_at: float  # seconds since the epoch: when the group was settled
    prompt_hash: str
    messages: Sequence[TaggedMessage]  # of the prompt
    columns: Mapping[str, Any]
    rollouts: Sequence[RolloutRow]


def to_json(row: GroupRow) -> bytes:
    """One JSON object, without a line end: every field of the row."""
    return orjson.dumps(row)


def from_json(line: bytes) -> GroupRow:
    """The row of a line.

    Raises:
        ValueError: it is not JSON, or not a row of this schema.
    """
    content = orjson.loads(line)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema!r}, this version reads {SCHEMA}")
    try:
        shared_ids = content.pop("prompt_ids", None)
        return GroupRow(
            **{
                **content,
                "status": GroupStatus(content["status"]),
                "messages": _messages_from(content["messages"]),
                "rollouts": [_rollout_from(rollout, shared_ids) for rollout in content["rollouts"]],
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks or misnames a field: {error}") from error


def from_columns(rows: Sequence[Mapping[str, Any]]) -> GroupRow:
    """The row of a group whose rollouts are `rows` of the view `rollouts` (schema.COLUMNS), in their order: every row of one
    `seq`.

    Raises:
        ValueError: the rows are not those of one group, or lack a column.
    """
    try:
        first = rows[0]
        if any(row["seq"] != first["seq"] for row in rows):
            raise ValueError(f"rows of several groups: seq {sorted({row['seq'] for row in rows})}")
        return GroupRow(
            schema=SCHEMA,
            seq=first["seq"],
            group_id=first["group_id"],
            prompt_id=first["prompt_id"],
            step=first["step"],
            status=GroupStatus(first["group_status"]),
            written_at=first["written_at"],
            prompt_hash=first["prompt_hash"],
            messages=_messages_from(orjson.loads(first["prompt_messages"])),
            columns=orjson.loads(first["columns"]),
            rollouts=[_rollout_from_columns(row) for row in rows if row["rollout_index"] is not None],
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"they lack or misname a column: {error!r}") from error


def _rollout_from_columns(row: Mapping[str, Any]) -> RolloutRow:
    content = {name: row[name] for name in RolloutRow.__dataclass_fields__}
    content |= {name: None if row[name] is None else orjson.loads(row[name]) for name in _JSON_COLUMNS}
    content["started_at"] = content["started_at"] or 0.0
    return _rollout_from(content, None)


def _rollout_from(content: dict[str, Any], shared_ids: list[int] | None) -> RolloutRow:
    reset = content.get("reset_messages")
    return RolloutRow(
        **{
            **content,
            **{name: _as_float32(content.get(name)) for name in _FLOAT_LISTS},
            "status": RolloutStatus(content["status"]),
            "messages": _messages_from(content["messages"]),
            "reset_messages": None if reset is None else _messages_from(reset),
            "turns": [_turn_from(turn) for turn in content["turns"]],
            "prompt_ids": shared_ids if content["prompt_ids"] is None else content["prompt_ids"],
        }
    )


def _as_float32(values: Sequence[float | None] | None) -> list[float | None] | None:
    """The numbers that the text stands for: it is the shortest that gives the float32 again."""
    if values is None:
        return None
    rounded = np.array(values, dtype=np.float32)  # None becomes NaN
    found: list[float | None] = rounded.tolist()
    if np.isnan(rounded).any():
        return [None if value != value else value for value in found]
    return found


def _messages_from(messages: Sequence[dict[str, Any]]) -> list[TaggedMessage]:
    return [
        TaggedMessage(
            **{**content, "origin": Origin(content["origin"]), "tool_calls": tuple(content.get("tool_calls", ()))}
        )
        for content in messages
    ]


def _turn_from(content: dict[str, Any]) -> TurnRow:
    calls = [ToolCallRecord(**call) for call in content["tool_calls"]]
    return TurnRow(**{**content, "finish_reason": FinishReason(content["finish_reason"]), "tool_calls": calls})
