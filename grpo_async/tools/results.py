"""What the model sees of a call: the result as text, or the error."""

from __future__ import annotations

import json
from typing import Any

from grpo_async.errors import GrpoAsyncError
from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.text import text_of_parts


class ToolError(GrpoAsyncError):
    """One tool call failed. The model sees the message: one short line that says how to do better. A tool may raise it,
    too; then the model gets the message unchanged, without the type's name."""


def as_text(value: Any) -> str:
    """A str unchanged, text parts joined, everything else as JSON, or by `str()` if JSON cannot represent it.

    "3" -> `3`; 3 -> `3`; {"a": "é"} -> `{"a": "é"}`; [{"type": "text", "text": "a"}] -> `a`; None -> `null`, not an
    empty text, because some chat templates omit an empty message; date(2024, 1, 2) -> `2024-01-02`.

    Raises:
        ToolError: the value contains an image or a part that is not text.
    """
    if isinstance(value, str):
        return encodable(str(value))  # a subclass (StrEnum) as its plain text
    text = joined_parts(value)
    if text is None:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # not JSON: sets, dates, circular references
            text = str(value)
    return encodable(text)


def joined_parts(value: Any) -> str | None:
    """The text of content parts, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] -> "ab"; None if `value` is
    not a list of content parts.

    Raises:
        ToolError: some part is not text.
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
        raise ToolError(f"the result cannot be given to the model: {error}") from error


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
