"""Builders for the tests of this folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.chat import ChatRenderer
from grpo_async.records import Origin, TaggedMessage, ToolCall
from tests.support.chat_families import FAMILIES, family

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Do sums.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
TOOLS = [SEARCH, CALCULATE]


def renderer_of(name: str, **options: Any) -> ChatRenderer:
    """A renderer of a family, with the end-of-turn tokens that its models have."""
    options.setdefault("end_of_turn_tokens", FAMILIES[name].end_tokens)
    return ChatRenderer(copy.deepcopy(family(name)) if "chat_template" in options else family(name), **options)


def user(text: str) -> TaggedMessage:
    return TaggedMessage(role="user", content=text, origin=Origin.PROMPT)


def call(name: str = "search", number: int = 0, turn: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(tool_call_id=f"c{turn:04d}{number:04d}", name=name, arguments=arguments)


def assistant(content: str, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    made = [c.as_dict() for c in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def rendered(name: str, messages: Sequence[Mapping[str, Any]], *, generation: bool, **options: Any) -> str:
    """What the template alone makes of a whole conversation."""
    text = family(name).apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation, **options
    )
    assert isinstance(text, str)
    return text


def tokens(name: str, text: str) -> list[int]:
    """Plain tokenization, control tokens included."""
    return [int(token) for token in family(name)(text, add_special_tokens=False)["input_ids"]]


def pieces(name: str, ids: Sequence[int]) -> list[str]:
    return [family(name).decode([token]) for token in ids]
