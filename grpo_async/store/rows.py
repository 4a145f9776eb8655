"""The rows of the rollout store and their JSON form.

    RolloutGroup + RolloutSample... -> GroupRow(RolloutRow(TurnRow...)...) <-> one JSON object

A row stands for itself: it holds the texts, the token ids and what training made of them, so that a rollout can be
looked at without the data set or the model. Field names are the JSON keys. A change that an older reader would get
wrong raises SCHEMA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from grpo_async.records import (
    FinishReason,
    GroupStatus,
    Origin,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    RolloutStatus,
    ScoredGroup,
    TaggedMessage,
    ToolCallRecord,
    TurnRecord,
)

SCHEMA = 2
_READABLE = (1, 2)  # 1 lacks what has a default here: tool calls of messages, extra columns, parse errors


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One generation: its length, its durations in seconds, and the tool calls that followed."""

    num_tokens: int
    finish_reason: FinishReason
    generation_duration_s: float
    tool_execution_duration_s: float
    tool_calls: Sequence[ToolCallRecord]
    parse_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout. `completion_ids`, `mask`, `logprobs` and `versions` have equal length.

    Where the mask is 0 (tool and environment tokens) the logprob is 0.0 and the version -1. `reward` and `advantage`
    are None for a rollout that was never scored.
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
    total_duration_s: float
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    prompt_messages: Sequence[TaggedMessage] | None = None  # where an environment's reset changed those of the group
    # What reward functions noted with log_extra, and columns that a rollout function returned; on a clash the former.
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampled_versions(self) -> set[int]:
        """Policy versions that sampled its tokens."""
        return {version for version, mask in zip(self.versions, self.mask, strict=True) if mask}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group. `step` is the optimizer step that used or dropped it, if any."""

    schema: int
    group_id: int
    prompt_id: int
    step: int | None
    status: GroupStatus
    messages: Sequence[TaggedMessage]  # of the prompt
    columns: Mapping[str, Any]
    rollouts: Sequence[RolloutRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What scoring made of one rollout; the default is that of a rollout that was never scored."""

    reward: float | None = None
    advantage: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def group_row(
    group: RolloutGroup,
    samples: Sequence[RolloutSample],
    status: GroupStatus,
    step: int | None,
    scored: ScoredGroup | None = None,
) -> GroupRow:
    """The row of a group. Rewards come from its samples, and from `scored` where a filtered group has none."""
    outcomes = _outcomes(samples, scored)
    return GroupRow(
        schema=SCHEMA,
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        step=step,
        status=status,
        messages=_messages(group.prompt.messages),
        columns=_storable_items(group.prompt.columns),
        rollouts=[_rollout_row(each, outcomes.get(each.rollout_id, _Outcome())) for each in group.completions],
    )


def to_json(row: GroupRow) -> bytes:
    """One line of JSON, without the line end."""
    return orjson.dumps(row)


def from_json(line: bytes) -> GroupRow:
    """The row of a line.

    Raises:
        ValueError: it is not JSON, or not a row of this schema.
    """
    content = orjson.loads(line)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in _READABLE:
        raise ValueError(f"its schema is {schema!r}, this version reads {_READABLE}")
    try:
        return GroupRow(
            **{
                **content,
                "status": GroupStatus(content["status"]),
                "messages": [_message_from(message) for message in content["messages"]],
                "rollouts": [_rollout_from(rollout) for rollout in content["rollouts"]],
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks or misnames a field: {error}") from error


def storable(value: Any) -> Any:
    """`value` as JSON has it; whatever JSON cannot hold becomes its repr."""
    try:
        return orjson.loads(
            orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        )
    except TypeError:  # orjson's encode error: an integer above 64 bits, half a surrogate pair, an odd key
        return _text(repr(value))


def _outcomes(samples: Sequence[RolloutSample], scored: ScoredGroup | None) -> dict[str, _Outcome]:
    """By rollout id."""
    found: dict[str, _Outcome] = {}
    if scored is not None:
        scores = zip(scored.group.trainable, scored.rewards, scored.reward_parts, strict=True)
        for index, (completion, reward, parts) in enumerate(scores):
            extra = _storable_items({name: values[index] for name, values in scored.extra_columns.items()})
            found[completion.rollout_id] = _Outcome(reward=reward, rewards=dict(parts), extra=extra)
    for sample in samples:
        found[sample.rollout_id] = _Outcome(
            reward=sample.reward,
            advantage=sample.advantage,
            rewards=dict(sample.rewards),
            extra=found.get(sample.rollout_id, _Outcome()).extra,
        )
    return found


def _rollout_row(completion: RolloutCompletion, outcome: _Outcome) -> RolloutRow:
    return RolloutRow(
        rollout_id=completion.rollout_id,
        status=completion.status,
        truncated=completion.truncated,
        done=completion.done,
        error=_optional_text(completion.error),
        num_tokens=completion.num_sampled_tokens,
        reward=outcome.reward,
        advantage=outcome.advantage,
        rewards={_text(name): value for name, value in outcome.rewards.items()},
        messages=_messages(completion.completion_messages()),
        turns=[_turn_row(turn) for turn in completion.turns],
        total_duration_s=completion.total_duration_s,
        prompt_ids=list(completion.prompt_ids),
        completion_ids=completion.completion_ids,
        mask=completion.completion_mask,
        logprobs=completion.logprobs,
        versions=completion.versions,
        prompt_messages=None if completion.prompt_messages is None else _messages(completion.prompt_messages),
        extra={**_storable_items(completion.reward_columns), **outcome.extra},
    )


def _turn_row(turn: TurnRecord) -> TurnRow:
    return TurnRow(
        num_tokens=len(turn.output_ids),
        finish_reason=turn.finish_reason,
        generation_duration_s=turn.generation_duration_s,
        tool_execution_duration_s=turn.tool_execution_duration_s,
        parse_error=_optional_text(turn.parse_error),
        tool_calls=[
            replace(
                call,
                tool_call_id=_text(call.tool_call_id),
                name=_text(call.name),
                arguments=_storable_items(call.arguments),
                result=_text(call.result),
            )
            for call in turn.tool_calls
        ],
    )


def _messages(messages: Sequence[TaggedMessage]) -> list[TaggedMessage]:
    return [
        replace(
            m,
            role=_text(m.role),
            content=_text(m.content),
            tool_calls=tuple(_storable_call(call) for call in m.tool_calls),
            name=_optional_text(m.name),
            tool_call_id=_optional_text(m.tool_call_id),
        )
        for m in messages
    ]


def _storable_items(items: Mapping[str, Any]) -> dict[str, Any]:
    """One by one: a policy may write an integer above 64 bits, which costs that argument its type, not the others theirs."""
    return {_text(str(name)): storable(value) for name, value in items.items()}


def _storable_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """{"id", "type", "function": {"name", "arguments"}}, as ToolCall.as_dict makes it."""
    function = call.get("function", {})
    arguments = _storable_items(function.get("arguments", {}))
    return {**_storable_items(call), "function": {**_storable_items(function), "arguments": arguments}}


def _text(text: str) -> str:
    """Text that UTF-8 can hold: half a surrogate pair, which a tool may return and a policy may write in ASCII ("\\ud800" in
    JSON), becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _optional_text(text: str | None) -> str | None:
    return None if text is None else _text(text)


def _message_from(content: dict[str, Any]) -> TaggedMessage:
    calls = tuple(content.get("tool_calls", ()))
    return TaggedMessage(**{**content, "origin": Origin(content["origin"]), "tool_calls": calls})


def _rollout_from(content: dict[str, Any]) -> RolloutRow:
    return RolloutRow(
        **{
            **content,
            "status": RolloutStatus(content["status"]),
            "messages": [_message_from(message) for message in content["messages"]],
            "prompt_messages": [_message_from(m) for m in changed]
            if (changed := content.get("prompt_messages"))
            else None,
            "turns": [_turn_from(turn) for turn in content["turns"]],
        }
    )


def _turn_from(content: dict[str, Any]) -> TurnRow:
    calls = [ToolCallRecord(**call) for call in content["tool_calls"]]
    return TurnRow(**{**content, "finish_reason": FinishReason(content["finish_reason"]), "tool_calls": calls})
