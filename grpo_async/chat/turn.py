"""What the policy wrote in one turn: as sampled, and as read; and the one error of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async.errors import GrpoAsyncError
from grpo_async.records import ToolCall


class ChatError(GrpoAsyncError):
    """These messages cannot be turned into token ids; only the rollout they belong to is lost. At startup the same problem is
    a ConfigError."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What a format found in a turn. The id of a call is what the policy itself wrote, where its format has ids."""

    content: str
    calls: Sequence[ToolCall] = ()
