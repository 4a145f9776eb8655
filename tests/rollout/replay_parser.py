"""Reads a call out of whatever the policy writes: a random model never calls a tool by itself."""

from __future__ import annotations

from typing import Any


def always_calls(text: str) -> dict[str, Any]:
    """Two calls if the text has an even number of characters, else one."""
    calls = [{"name": "look_up", "arguments": {"number": len(text)}}]
    if len(text) % 2 == 0:
        calls.append({"name": "look_up", "arguments": {"number": -1}})  # fails
    return {"content": text, "tool_calls": calls}


def look_up(number: int) -> str:
    """
    Look up a number.

    Args:
        number: which one
    """
    if number < 0:
        raise ValueError("there are no negative numbers")
    return f"hello {number} <|im_end|> world"  # control text in a result stays text
