"""Text of others made safe to print, and the last lines of a log."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TAIL_BYTES = 64 * 1024
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_BREAKS = re.compile(r"\s*[\n\t]\s*")
_DIRECTIONS = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` without terminal escapes and control characters, so that a log cannot move the cursor."""
    return _ESCAPES.sub("", text)


def one_line(text: str) -> str:
    """`plain` text on one line, without characters that turn the direction of what follows on a terminal."""
    return _BREAKS.sub(" ", _DIRECTIONS.sub("", plain(text))).strip()


def tail(path: Path, num_lines: int = 15) -> list[str]:
    """The last non-empty lines of a text file, escapes removed; empty when the file does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    lines = [plain(line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]  # a bar's last state only
    return [line for line in lines if line.strip()][-num_lines:]
