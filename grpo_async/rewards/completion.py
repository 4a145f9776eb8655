"""What the built-in rewards read from a completion, be it plain text or a list of messages."""

from __future__ import annotations

import re
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
    found: tuple[int, int] | None = None  # where the content of the last one begins and ends
    openings: list[int | None] = []  # of the braces that are open: where the content begins, None for other braces
    for token in _BOXES_AND_BRACES.finditer(text):
        kind = token[0]
        if kind == "}":
            if openings and (start := openings.pop()) is not None and (found is None or start > found[0]):
                found = start, token.start()
        elif kind == "{":
            openings.append(None)
        elif len(kind) > 2:
            openings.append(token.end())
    return text[slice(*found)].strip() if found else None


# One pass, however many are cut off. A backslash takes what follows it: the brace of `\{` is a character like others.
_BOXES_AND_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)\{|\\.|[{}]", re.DOTALL)


def _content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Content is text, or parts of which those of type `text` count, or None beside tool calls."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
