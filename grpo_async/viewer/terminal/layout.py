"""Lines of styled spans for the pages that scroll: text and tokens flowed into a width. Pure; no library of the terminal.

Worked example: flow_tokens([(0, "a"), (1, " bc"), (2, "\\n")], width=3) -> ["a"], [" bc"], ["⏎"]: no token is cut that fits a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len

from grpo_async.viewer.safe_text import visible

END_OF_LINE = "⏎"
NO_TEXT = "∅"  # a token whose text is empty: special ones of some tokenizers


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one style. `token` is the index of the completion token it shows, -1 where it shows none."""

    text: str  # nothing that a terminal would obey, no line ends
    style: str = ""  # as rich spells it; for tokens empty: their colour is looked up when they are drawn
    token: int = -1


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the page. `fold` names what is folded or unfolded by a click on it."""

    spans: tuple[Span, ...] = ()
    fold: str = ""

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


def token_label(text: str) -> str:
    """How a token stands in a line: its line ends as ⏎, tabs as →, never nothing."""
    shown = visible(text).replace("\n", END_OF_LINE).replace("\t", "→   ")
    return shown if shown else NO_TEXT


def flow_tokens(tokens: Iterable[tuple[int, str]], width: int, *, indent: int = 0, style: str = "") -> Iterator[Line]:
    """Lines of tokens (index, text). A line end within a token breaks the line behind it; a token that does not fit goes to the
    next line, and one longer than a line is cut over several."""
    margin = [Span(" " * indent)] if indent else []
    room = max(1, width - indent)
    line, used = list(margin), 0
    for index, text in tokens:
        for piece in _pieces(token_label(text)):
            for part in _cut(piece, room):
                length = cell_len(part)
                if used and used + length > room:
                    yield Line(tuple(line))
                    line, used = list(margin), 0
                line.append(Span(part, style, index))
                used += length
            if piece.endswith(END_OF_LINE):
                yield Line(tuple(line))
                line, used = list(margin), 0
    if used:
        yield Line(tuple(line))


def flow_text(text: str, width: int, *, indent: int = 0, style: str = "", limit: int | None = None) -> list[Line]:
    """Lines of text, broken at spaces where that is possible; with `limit`, at most so many and one that says how many more."""
    margin, room = " " * indent, max(1, width - indent)
    lines = [Line((Span(margin + part, style),)) for each in visible(text).split("\n") for part in _wrap(each, room)]
    if limit is not None and len(lines) > limit + 1:
        rest = len(lines) - limit
        return [*lines[:limit], Line((Span(f"{margin}… {rest} more lines", "dim italic"),))]
    return lines


def flow_words(words: Iterable[tuple[str, str]], width: int) -> Iterator[Line]:
    """Lines of (text, style) words, each with the spaces behind it; "\\n" alone ends a line."""
    line: list[Span] = []
    used = 0
    for text, style in words:
        if text == "\n":
            yield Line(tuple(line))
            line, used = [], 0
            continue
        for part in _cut(text.replace("\t", "    "), max(1, width)):
            if used and used + cell_len(part.rstrip()) > width:
                yield Line(tuple(line))
                line, used = [], 0
            if line and line[-1].style == style:
                line[-1] = Span(line[-1].text + part, style)
            else:
                line.append(Span(part, style))
            used += cell_len(part)
    if used:
        yield Line(tuple(line))


def _pieces(text: str) -> list[str]:
    """Split behind each ⏎: 'a⏎b' -> ['a⏎', 'b']."""
    parts = text.split(END_OF_LINE)
    return [part + END_OF_LINE for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _cut(text: str, room: int) -> Iterator[str]:
    """Pieces of at most `room` cells."""
    if text.isascii():
        yield from (text[start : start + room] for start in range(0, len(text), room))
        return
    part, used = "", 0
    for character in text:
        length = cell_len(character)
        if part and used + length > room:
            yield part
            part, used = "", 0
        part, used = part + character, used + length
    if part:
        yield part


def _wrap(text: str, room: int) -> Iterator[str]:
    """One paragraph in lines of at most `room` cells. Spaces at the start of a line are kept: they may be an indent."""
    text = text.replace("\t", "    ")
    while cell_len(text) > room:
        head = next(_cut(text, room))
        space = head.rfind(" ")
        at = space + 1 if space > 0 and head[:space].strip() else len(head)
        yield text[:at].rstrip()
        text = text[at:]
    yield text
