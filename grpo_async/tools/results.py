"""What the model sees of a call: the result as text, or the error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from grpo_async.errors import GrpoAsyncError
from grpo_async.user_code.calls import own_copy
from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.text import text_of_parts


class ToolError(GrpoAsyncError):
    """One tool call failed. The model sees the message: one short line that says how to do better. A tool may raise it,
    too; then the model gets the message unchanged, without the type's name."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call: `text` for the model, and for reward functions the list itself if the tool returned one, as in TRL."""

    text: str
    returned: list[Any] | None = None

    @classmethod
    def of(cls, value: Any) -> ToolResult:
        """Text parts joined, everything else by `str()`, as in TRL.

        3 -> `3`; {"a": "é"} -> `{'a': 'é'}`; [("a", 1)] -> `[('a', 1)]`; [{"type": "text", "text": "a"}] -> `a`; None -> `None`.
        """
        text = joined_parts(value)
        returned = own_copy(value) if isinstance(value, list) else None  # a tool may go on changing it
        return cls(encodable(str(value) if text is None else text), returned)


def joined_parts(value: Any) -> str | None:
    """The text of content parts, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] -> "ab"; None if `value` is
    not a list of content parts.
    """
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in value):
        return None
    kinds = {"text", "image", "image_url", "audio", "video"}
    if not all(
        part["type"] in kinds and (part["type"] != "text" or isinstance(part.get("text"), str)) for part in value
    ):
        return None  # a list of other objects that happen to have a `type`
    try:
        return text_of_parts(value)
    except ValueError as error:
        raise ValueError(f"the result cannot be given to the model: {error}") from error


def truncate(text: str, max_chars: int) -> str:
    """The first `max_chars` characters and a note: truncate("abcdef", 4) -> "abcd [cut: 2 more characters]"."""
    missing = len(text) - max_chars
    return text if missing <= 0 else f"{text[:max_chars]} [cut: {missing} more characters]"


def error_text(problem: str, max_chars: int) -> str:
    """How a failure is reported to the model: {"error": "..."}."""
    return json.dumps({"error": truncate(encodable(problem), max_chars)}, ensure_ascii=False)


def encodable(text: str) -> str:
    """Replace lone surrogates, which neither tokenizers nor the rollout store can encode, by U+FFFD."""
    return SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
