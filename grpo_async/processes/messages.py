"""Messages between the processes of a run: JSON objects with a `kind`, one per line (`control`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class NotAMessageError(ValueError):
    """A line that is not a message."""


def encode(kind: str, content: Mapping[str, Any]) -> bytes:
    """One line. Raises TypeError: `content` is not JSON."""
    return json.dumps({"kind": kind, **content}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line. Raises NotAMessageError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: lists in lists in lists
        raise NotAMessageError(f"no JSON: {line[:200]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise NotAMessageError(f"no object with a `kind`: {line[:200]!r}")
    return message
