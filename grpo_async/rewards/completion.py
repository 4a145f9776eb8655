"""What the built-in rewards read from a completion, be it plain text or a list of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def final_text(completion: Any) -> str:
    """Text of the last assistant message, "" if there is none; a plain string is its own text.

    Example: [{"role": "assistant", "content": "4"}, {"role": "tool", "content": "ok"}] -> "4".
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return _content_text(message.get("content"))
    return ""


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it when there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...} or \fbox{...}, braces balanced; None if there is none.

    Example: r"\boxed{1} so \boxed{\frac{1}{2}}" -> r"\frac{1}{2}".
    """
    end = len(text)
    while True:
        start = max(text.rfind(r"\boxed{", 0, end), text.rfind(r"\fbox{", 0, end))
        if start < 0:
            return None
        opening = text.index("{", start)
        closing = _closing_brace(text, opening)
        if closing is not None:
            return text[opening + 1 : closing].strip()
        end = start  # cut off before its closing brace: look for an earlier one


def _closing_brace(text: str, opening: int) -> int | None:
    depth = 0
    for position in range(opening, len(text)):
        character = text[position]
        if character in "{}" and not _is_escaped(text, position):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
    return None


def _is_escaped(text: str, position: int) -> bool:
    backslashes = 0
    while position > backslashes and text[position - backslashes - 1] == "\\":
        backslashes += 1
    return backslashes % 2 == 1


def _content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Content is text, or parts of which those of type `text` count, or None beside tool calls."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
