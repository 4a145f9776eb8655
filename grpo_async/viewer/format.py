"""Numbers, statuses, prompts and tool calls as every view writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from grpo_async.records import GroupStatus, RolloutStatus, TaggedMessage
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.utils.text import percent

STATUS_STYLES: dict[str, str] = {
    GroupStatus.TRAINED: "green",
    GroupStatus.FILTERED: "yellow",
    GroupStatus.STALE: "magenta",
    GroupStatus.FAILED: "red",
    GroupStatus.CANCELLED: "dim",
    GroupStatus.EVALUATED: "cyan",
    RolloutStatus.FINISHED: "green",
    RolloutStatus.TRUNCATED: "yellow",
}
"""Style of a group's or a rollout's status, as rich and textual spell it."""


T = TypeVar("T")


def or_dash(value: T | None, form: Callable[[T], str] = str) -> str:
    """`value` in a form; None -> '-'."""
    return "-" if value is None else form(value)


def number(value: float | None, digits: int = 3) -> str:
    """0.25 -> '0.250'; None -> '-'."""
    return or_dash(value, f"{{:.{digits}f}}".format)


def signed(value: float | None, digits: int = 3) -> str:
    """0.25 -> '+0.250'; None -> '-'."""
    return or_dash(value, f"{{:+.{digits}f}}".format)


def count(number_of: int, noun: str) -> str:
    """1, 'group' -> '1 group'; 3000, 'group' -> '3,000 groups'."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def span(first: int | None, last: int | None) -> str:
    """2, 2 -> '2'; 2, 3 -> '2-3'; None -> '-'."""
    return or_dash(first) if first == last else f"{first}-{last}"


def fraction(part: int, whole: int) -> str:
    """1, 4 -> '25%'; of nothing '-'."""
    return percent(part / whole) if whole else "-"


def versions(rollout: RolloutRow) -> str:
    """Policy versions that sampled its tokens: '3', '3-5', '-' for none."""
    sampled = rollout.sampled_versions
    return span(min(sampled, default=None), max(sampled, default=None))


def prompt_of(group: GroupRow, rollout: RolloutRow | None = None) -> Sequence[TaggedMessage]:
    """The prompt of a rollout, which an environment's reset may have changed. Without `rollout` the one that all rollouts of the
    group had; where they had different ones, that of the data."""
    if rollout is not None:
        return group.messages if rollout.reset_messages is None else rollout.reset_messages
    own = [each.reset_messages for each in group.rollouts if each.reset_messages is not None]
    return own[0] if own and all(messages == own[0] for messages in own) else group.messages


def call_text(call: Mapping[str, Any]) -> str:
    """A tool call of a message: 'add({"a": 1})'. The name and the arguments are as the model wrote them."""
    function = call.get("function", {})
    return f"{function.get('name')}({json.dumps(function.get('arguments'), ensure_ascii=False)})"


def message_text(message: TaggedMessage) -> str:
    """What a message says, and its tool calls, in lines."""
    return "\n".join(part for part in (message.content, *map(call_text, message.tool_calls)) if part)


def conversation(messages: Sequence[TaggedMessage]) -> str:
    """One message: its text. Several, or one that calls tools: "[role]" above each."""
    if len(messages) == 1 and not messages[0].tool_calls:
        return messages[0].content
    return "\n\n".join(f"[{each.role}]\n{message_text(each)}" for each in messages)
