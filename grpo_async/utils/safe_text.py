"""Text of models, data, tools and logs on a terminal: shown, never obeyed.

A model can sample escape sequences; printed as they are they would move the cursor or change the terminal's title. Messages and
logs lose them (`plain`, `one_line`); where the text itself is looked at they are made visible (`visible` and those below it).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo_async.utils.text import clipped

BIDI_CONTROLS = "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069"
"""Unicode's bidirectional control characters, for use inside a pattern's []: they turn the direction of what follows."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: a policy may write one in ASCII ("\\ud800" in JSON), a tool may return one, and UTF-8 has none."""

_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
_CONTROL, _BIDI_CONTROL = re.compile(_CONTROLS), re.compile(f"[{BIDI_CONTROLS}]")
_ESCAPES = re.compile(rf"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|{_CONTROLS}")
_BREAKS = re.compile(r"\s*[\n\t]\s*")
_TAIL_BYTES = 64 * 1024


def safe_repr(value: object) -> str:
    """`repr(value)` of a user's own type, whose repr may be broken: what is stored or shown must not end the run."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a user's code
        return f"<{type(value).__name__}: its repr raised {type(error).__name__}>"


def plain(text: str) -> str:
    """`text` without terminal escapes and control characters, so that a log cannot move the cursor."""
    return _ESCAPES.sub("", text)


def one_line(text: str) -> str:
    """`plain` text on one line, without bidirectional control characters."""
    return _BREAKS.sub(" ", _BIDI_CONTROL.sub("", plain(text))).strip()


def escape_surrogates(text: str) -> str:
    """`text` with the escape of each lone surrogate, so that it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def tail(path: Path, num_lines: int = 15) -> list[str]:
    """The last non-empty lines of a log, `plain`; empty when the file does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    lines = [plain(line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]  # a bar's last state only
    return [line for line in lines if line.strip()][-num_lines:]


def visible(text: str) -> str:
    """`text` with control characters as pictures (ESC -> ␛) and bidirectional control characters as escapes; \\n and \\t stay."""
    pictured = _CONTROL.sub(lambda match: _picture(ord(match[0])), text.replace("\r\n", "\n"))
    return _BIDI_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", pictured)


def visible_line(text: str, limit: int) -> str:
    """`visible` text on one line of at most `limit` characters."""
    return clipped(" ".join(visible(text).split()), limit)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\x{code:02x}"
