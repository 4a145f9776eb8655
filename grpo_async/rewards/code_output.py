"""Whether a program printed what was wanted."""

from __future__ import annotations

import math

_TOLERANCE = 1e-6


def is_same_output(given: str, wanted: str) -> bool:
    """Line by line; white space at the ends of lines and empty lines at the end do not count, nor how a number is written.

    Example: "0.50\\n" and "0.5" -> True; "1 2" and "1\\n2" -> False.
    """
    given_lines, wanted_lines = _lines(given), _lines(wanted)
    return len(given_lines) == len(wanted_lines) and all(map(_is_same_line, given_lines, wanted_lines))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _is_same_line(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    given_words, wanted_words = given.split(), wanted.split()
    return len(given_words) == len(wanted_words) and all(map(_is_same_word, given_words, wanted_words))


def _is_same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if not any(mark in wanted.lower() for mark in ".e"):
        return False  # whole numbers and words are exact
    try:
        return math.isclose(float(given), float(wanted), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False
