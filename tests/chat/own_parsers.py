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


def raises(text: str) -> dict[str, Any]:
    raise RuntimeError("no such luck")


def returns_text(text: str) -> Any:
    return "search()"


def breaks_the_rules(text: str) -> Any:
    return [{"name": "search", "arguments": {"query": float("nan")}}]


def takes_two(text: str, other: str) -> dict[str, Any]:
    return {}
