"""Text of models, data and tools on a terminal: shown, never obeyed.

A model can sample escape sequences; printed as they are they would move the cursor or change the terminal's title.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BIDI = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` with control characters as pictures (ESC -> ␛) and marks of direction as escapes; \\n and \\t stay."""
    pictured = _CONTROL.sub(lambda match: _picture(ord(match[0])), text.replace("\r\n", "\n"))
    return _BIDI.sub(lambda match: f"\\u{ord(match[0]):04x}", pictured)


def one_line(text: str, limit: int) -> str:
    """`visible` text on one line of at most `limit` characters."""
    flat = " ".join(visible(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def quoted(text: str) -> str:
    """A token's text with its spaces and line ends visible: ' two\\n'."""
    escaped = visible(text).replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    return f"'{escaped}'"


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\x{code:02x}"
