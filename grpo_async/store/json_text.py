"""Lines of JSON that a terminal shows and does not obey, whatever a model wrote."""

from __future__ import annotations

import re

_OBEYED = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(line: str) -> str:
    """`line`, one JSON value, with the control characters above 0x7e and the marks of direction as \\u escapes: the same value.

    JSON has these characters inside of strings only, and those below 0x20 escaped already.
    """
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
