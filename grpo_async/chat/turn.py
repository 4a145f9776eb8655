"""What the policy wrote in one turn: as sampled, and as read; tool calls written as JSON; and the errors of this package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.errors import GrpoAsyncError
from grpo_async.records import ToolCall
from grpo_async.utils.strict_json import UnreadableError, arguments_of
from grpo_async.utils.text import clipped, json_kind


class ChatError(GrpoAsyncError):
    """These messages cannot be turned into token ids; only the rollout they belong to is lost. At startup the same problem is
    a ConfigError."""


class TooLongError(ChatError):
    """The messages have more tokens than a context holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """One turn of the policy, read."""

    text: str  # all of it, without special tokens
    content: str  # without the tool calls, as chat templates expect it; with the thinking
    tool_calls: Sequence[ToolCall] = ()  # those that cannot be read have an `error`
    parse_error: str | None = None  # why `text` could not be searched for calls; `content` is then all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One turn of the policy, as a format reads it."""

    text: str  # without special tokens
    marked_text: str  # without special tokens, except those that the format asked for
    thinking_is_open: bool = False  # the generation prompt ended inside <think>
    tools: Sequence[Mapping[str, Any]] = ()  # the schemas of the tools on offer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What a format found in a turn. The id of a call is what the policy itself wrote, where its format has ids."""

    content: str
    calls: Sequence[ToolCall] = ()


def joined(pieces: Sequence[str]) -> str:
    """The text around the calls: [" I look.\\n", "", "\\n"] -> "I look."."""
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip()))


def explained(calls: Sequence[ToolCall], how: str) -> list[ToolCall]:
    """Each error with how a call is written, so that the policy can do better."""
    return [
        call if call.error is None else failed_call(call.name, call.error, how, call.tool_call_id) for call in calls
    ]


def failed_call(name: str, problem: str, how: str, call_id: str = "") -> ToolCall:
    """A call that the policy is told it cannot make."""
    return ToolCall(name=name, error=f"this tool call cannot be read: {problem}; {how}", tool_call_id=call_id)


def calls_of(value: Any) -> list[ToolCall]:
    """The calls in a JSON value: an object is one, a list holds several. Never raises."""
    items = value if isinstance(value, list) else [value]
    return [call_of(item) for item in items]


def call_of(item: Any) -> ToolCall:
    """One call. {"name": "add", "arguments": {"a": 1}} -> add(a=1)."""
    if not isinstance(item, Mapping):
        return ToolCall(error=f"a call is a JSON object with `name` and `arguments`, not {json_kind(item)}")
    function = item.get("function")
    written_id = item.get("id")
    if isinstance(function, Mapping):
        item = function
    call_id = written_id if isinstance(written_id, str) else ""
    name = item.get("name")
    if not isinstance(name, str) or not name.strip():
        problem = "is missing" if name is None else f"must be the name of a tool, not {clipped(json.dumps(name))}"
        return ToolCall(error=f"`name` {problem}", tool_call_id=call_id)
    key = "arguments" if "arguments" in item or "parameters" not in item else "parameters"
    return named_call(name.strip(), item.get(key), call_id=call_id)


def named_call(name: str, arguments: Any, *, call_id: str = "") -> ToolCall:
    """A call whose name is known."""
    if not name:
        return ToolCall(error="`name` is missing", tool_call_id=call_id)
    try:
        arguments = arguments_of(arguments)
    except UnreadableError as error:
        return ToolCall(name=name, error=f"the arguments cannot be read: {error}", tool_call_id=call_id)
    return ToolCall(name=name, arguments=dict(arguments), tool_call_id=call_id)
