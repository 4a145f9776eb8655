"""Numbers, statuses, prompts and tool calls as every view writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.records import GroupStatus, RolloutStatus, TaggedMessage
from grpo_async.store import GroupRow, RolloutRow

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


def number(value: float | None, digits: int = 3) -> str:
    """0.25 -> '0.250'; None -> '-'."""
    return "-" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """0.25 -> '+0.250'; None -> '-'."""
    return "-" if value is None else f"{value:+.{digits}f}"


def whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def count(number_of: int, noun: str) -> str:
    """1, 'group' -> '1 group'; 3000, 'group' -> '3,000 groups'."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def span(first: int | None, last: int | None) -> str:
    """2, 2 -> '2'; 2, 3 -> '2-3'; None -> '-'."""
    if first is None or last is None:
        return "-"
    return str(first) if first == last else f"{first}-{last}"


def percent(fraction: float | None) -> str:
    """0.25 -> '25%'; None -> '-'."""
    return "-" if fraction is None else f"{fraction:.0%}"


def duration(seconds: float) -> str:
    """3725 -> '1:02:05', 75 -> '1:15', 2.5 -> '2.50 s', 0.0042 -> '4.2 ms'."""
    if seconds >= 60.0:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000.0 * seconds:.1f} ms"


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
