"""Prompts, messages, tool calls, trees of calls and flags of tokens as text, the same in every view."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_async.records import Origin, TaggedMessage, TokenFlag
from grpo_async.store import GroupRow, RolloutRow
from grpo_async.utils.safe_text import visible_line
from grpo_async.utils.strict_json import arguments_text
from grpo_async.utils.text import count, duration

T = TypeVar("T")


def or_dash(value: T | None, form: Callable[[T], str] = str) -> str:
    """`value` in a form; None -> '-'."""
    return "-" if value is None else form(value)


def number(value: float | None, digits: int = 3) -> str:
    """0.25 -> '0.250'; None -> '-'."""
    return or_dash(value, f"{{:.{digits}f}}".format)


def prompt_of(group: GroupRow, rollout: RolloutRow | None = None) -> Sequence[TaggedMessage]:
    """The prompt of a rollout, which an environment's reset may have changed. Without `rollout` the one that all rollouts of the
    group had; where they had different ones, that of the data."""
    if rollout is not None:
        return group.messages if rollout.reset_messages is None else rollout.reset_messages
    own = [each.reset_messages for each in group.rollouts if each.reset_messages is not None]
    return own[0] if own and all(messages == own[0] for messages in own) else group.messages


def call_text(call: Mapping[str, Any]) -> str:
    """A tool call of a message: 'add({"a": 1})'. The name and the arguments are as the model wrote them; one without a name
    stands as it is."""
    function = call.get("function", {})
    if not function.get("name"):
        return json.dumps(call, ensure_ascii=False)
    return f"{function['name']}({arguments_text(call)})"


def message_text(message: TaggedMessage) -> str:
    """What a message says, and its tool calls, in lines."""
    return "\n".join(part for part in (message.content, *map(call_text, message.tool_calls)) if part)


def conversation(messages: Sequence[TaggedMessage]) -> str:
    """One message: its text. Several, or one that calls tools: "[role]" above each."""
    if len(messages) == 1 and not messages[0].tool_calls:
        return messages[0].content
    return "\n\n".join(f"[{each.role}]\n{message_text(each)}" for each in messages)


_FLAG_NAMES = {
    TokenFlag.SKIPPED: "update skipped",
    TokenFlag.OFF_POLICY_MASKED: "off policy",
    TokenFlag.IMPORTANCE_MASKED: "masked by correction",
    TokenFlag.CLIPPED_LOW: "clipped low",
    TokenFlag.CLIPPED_HIGH: "clipped high",
}
"""The strongest first: a token has the color of one."""


def flag_names(flags: int | None) -> list[str]:
    """4 | 1 -> ['masked by correction', 'clipped low']; none for 0 and None."""
    return [name for flag, name in _FLAG_NAMES.items() if (flags or 0) & flag]


_REQUEST_WIDTH, _ANSWER_WIDTH = 60, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLine:
    """A line of the tree of calls: one of its paths (the rollout's own, or a branch), or a call below its path. `rollout_id` is
    that of the path."""

    depth: int
    rollout_id: str
    text: str
    is_path: bool


def call_tree(group: GroupRow, rollout: RolloutRow) -> Iterator[TreeLine]:
    """The calls of a rollout with branches: each path with its calls, and below it the paths that share its beginning.

    g7-r0 · 2 calls · 40 tokens · reward 1.000
      +0.0 s · 0.41 s · 31 tokens · stop · user: 12 + 7 = → add({"a": 12})
      +0.5 s · 0.2 s · 9 tokens · stop · tool: 19 → 19
      g7-r0.b1 · 1 call · 12 tokens · reward 1.000 · prompt: 57 tokens
        +0.9 s · ...
    """
    children: dict[str | None, list[RolloutRow]] = {}
    for path in rollout.paths:
        children.setdefault(path.parent, []).append(path)

    def lines(path: RolloutRow, depth: int) -> Iterator[TreeLine]:
        own = sum(turn.num_tokens for turn in path.turns)
        parts = [visible_line(path.rollout_id, 60), count(len(path.turns), "call"), count(own, "token")]
        parts.append(f"reward {number(path.reward)}")
        if path.parent is not None:
            parts.append(f"prompt: {count(len(path.prompt_ids), 'token')}")
        yield TreeLine(depth=depth, rollout_id=path.rollout_id, text=" · ".join(parts), is_path=True)
        for turn, (request, answer) in zip(path.turns, _exchanges(group, path), strict=False):
            since = turn.started_at - rollout.started_at if turn.started_at and rollout.started_at else None
            shown = [
                "-" if since is None else f"{since:+.1f} s",
                duration(turn.generation_duration_s),
                count(turn.num_tokens, "token"),
                visible_line(turn.ended_by, 40),
                f"{request} → {answer}",
            ]
            yield TreeLine(depth=depth + 1, rollout_id=path.rollout_id, text=" · ".join(shown), is_path=False)
        for child in children.get(path.rollout_id, ()):
            yield from lines(child, depth + 1)

    yield from lines(rollout, 0)


def _exchanges(group: GroupRow, path: RolloutRow) -> Iterator[tuple[str, str]]:
    """The last message of the request and the answer, in a line each, for each call of a path."""
    last: TaggedMessage | None = next(reversed(prompt_of(group, path)), None)
    for message in path.messages:
        if message.origin is Origin.POLICY:
            request = "" if last is None else f"{last.role}: {message_text(last)}"
            yield visible_line(request, _REQUEST_WIDTH), visible_line(message_text(message), _ANSWER_WIDTH)
        last = message
