"""A mistake in a query, shown to the person who wrote it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from grpo_async.errors import ConfigError


class QueryError(ConfigError):
    """The query is wrong. `str(error)` is three lines: the problem, the query, and carets under the mistake.

    Attributes:
        text: the query, on one line.
        position: where the mistake begins, in characters from 0; `length` (>= 1) is its extent.
        problem: one sentence.
        suggestions: names that were perhaps meant, the nearest first.
    """

    def __init__(self, text: str, position: int, length: int, problem: str, suggestions: Sequence[str] = ()) -> None:
        self.text = _one_line(text)
        self.position, self.length = position, max(length, 1)
        self.suggestions = tuple(suggestions)
        self.problem = _one_line(problem) + (
            f"; did you mean {' or '.join(self.suggestions)}?" if self.suggestions else ""
        )
        indent, carets = _width(self.text[:position]), _width(self.text[position : position + self.length])
        super().__init__(f"{self.problem}\n  {self.text}\n  {' ' * indent}{'^' * max(carets, 1)}")


def _one_line(text: str) -> str:
    """Control characters, line ends and halves of characters become spaces."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") else each for each in text)


def _width(text: str) -> int:
    """Columns that a terminal gives `text`."""
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )
