"""Parsers as a user might write them, good and bad."""

from __future__ import annotations

import re
from typing import Any


def brackets(text: str) -> dict[str, Any]:
    """CALL[name] anywhere."""
    names = re.findall(r"CALL\[(\w+)\]", text)
    return {
        "content": re.sub(r"CALL\[\w+\]", "", text).strip(),
        "tool_calls": [{"name": name, "arguments": {}} for name in names],
    }


def openai_form(text: str) -> list[dict[str, Any]]:
    return [{"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": '{"query": "a"}'}}]


def says_nothing(text: str) -> None:
    return None


def raises(text: str) -> dict[str, Any]:
    raise RuntimeError("no such luck")


def returns_text(text: str) -> Any:
    return "search()"


def content_is_a_number(text: str) -> Any:
    return {"content": 3, "tool_calls": []}


def breaks_the_rules(text: str) -> Any:
    return [{"name": "search", "arguments": {"query": float("nan")}}]


async def waits(text: str) -> dict[str, Any]:
    return {}


def takes_two(text: str, other: str) -> dict[str, Any]:
    return {}
