"""Where two texts differ, by words."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from grpo_async.utils.text import num_equal

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_MAX_COMPARED = 6000  # words, spaces and signs: comparing takes time with the square of them

Piece = tuple[str, str]
""" "same", "left" or "right", and its text."""


def differences(left: str, right: str) -> list[Piece]:
    """Pieces of both texts in order. A space between two changes belongs to them; of very long texts the middle counts as changed
    as a whole.

    "a b c" and "a x c" -> same "a ", left "b", right "x", same " c"
    """
    a, b = _WORD.findall(left), _WORD.findall(right)
    start = num_equal(a, b)
    end = num_equal(a[start:][::-1], b[start:][::-1])
    middle = a[start : len(a) - end], b[start : len(b) - end]
    blocks = [("equal", a[:start], []), *_changes(*middle), ("equal", a[len(a) - end :], [])]
    pieces: list[Piece] = []
    change = {"left": "", "right": ""}
    for tag, mine, theirs in (*blocks, ("end", [], [])):
        text = "".join(mine)
        if tag == "replace":
            change["left"] += text
            change["right"] += "".join(theirs)
        elif tag == "equal" and text.isspace() and any(change.values()):
            change = {side: said + text for side, said in change.items()}
        elif text or tag == "end":
            pieces += [(side, said) for side, said in change.items() if said]
            change = {"left": "", "right": ""}
            pieces += [("same", text)] if text else []
    return pieces


def _changes(a: list[str], b: list[str]) -> list[tuple[str, list[str], list[str]]]:
    if max(len(a), len(b)) > _MAX_COMPARED:
        return [("replace", a, b)]
    codes = SequenceMatcher(None, a, b).get_opcodes()
    return [("equal" if tag == "equal" else "replace", a[i:j], b[k:n]) for tag, i, j, k, n in codes]
