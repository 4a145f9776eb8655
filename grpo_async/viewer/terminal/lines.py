"""Pages of styled lines: text and tokens flowed into a width, and the widgets that scroll them.

Worked example: flow_tokens([(0, "a"), (1, " bc"), (2, "\\n")], width=3) -> ["a"], [" bc"], ["⏎"]: no token is cut that fits a
line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

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


NO_TOKEN = -1


class LinesView(ScrollView, can_focus=True):
    """Shows lines, below a head that does not scroll."""

    DEFAULT_CSS = "LinesView { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up,k", "line(-1)", "up"),
        ("down,j", "line(1)", "down"),
        ("pageup,ctrl+u", "page(-1)", "page up"),
        ("pagedown,ctrl+d,space", "page(1)", "page down"),
        ("home,g", "first", "top"),
        ("end,G", "last", "end"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._head: Sequence[Line] = ()
        self._lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line], head: Sequence[Line] = ()) -> None:
        """Another page, or the same one laid out anew."""
        self._head, self._lines = head, lines
        self.virtual_size = Size(self.size.width, len(head) + len(lines))
        self.refresh()

    def scroll_to_line(self, number: int) -> None:
        self.scroll_to(y=number, animate=False, immediate=True)

    def action_line(self, by: int) -> None:
        self.scroll_relative(y=by, animate=False, immediate=True)

    def action_page(self, by: int) -> None:
        LinesView.action_line(self, by * max(1, self.size.height - len(self._head) - 1))

    def action_first(self) -> None:
        self.scroll_to_line(0)

    def action_last(self) -> None:
        self.scroll_to_line(len(self._lines))

    def span_style(self, span: Span) -> Style:
        """How a span is drawn."""
        return self.rich_style + Style.parse(span.style) if span.style else self.rich_style

    def render_line(self, y: int) -> Strip:
        at = y if y < len(self._head) else int(self.scroll_offset.y) + y
        lines = self._head if y < len(self._head) else self._lines
        number = at if lines is self._head else at - len(self._head)
        if number >= len(lines):
            return Strip.blank(self.size.width, self.rich_style)
        segments = [Segment(span.text, self.span_style(span)) for span in lines[number].spans]
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)


class PageView(LinesView):
    """Shows lines with a cursor; tokens among them are coloured by `token_styles` and can be walked through."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("left,h", "token(-1)", "token before"),
        ("right,l", "token(1)", "next token"),
    ]

    class CursorMoved(Message):
        """The cursor stands on another token; NO_TOKEN: the page has none."""

        def __init__(self, token: int) -> None:
            self.token = token
            super().__init__()

    class FoldClicked(Message):
        def __init__(self, fold: str) -> None:
            self.fold = fold
            super().__init__()

    def __init__(self) -> None:
        super().__init__()
        self.cursor = NO_TOKEN
        self._line_of: dict[int, int] = {}  # token -> its first line
        self._styles: Sequence[Style] = ()

    def show(self, lines: Sequence[Line], head: Sequence[Line] = ()) -> None:
        """As LinesView; the cursor stays on its token where that is still there."""
        super().show(lines, head)
        self._line_of = {}
        for number, line in enumerate(lines):
            for span in line.spans:
                if span.token >= 0:
                    self._line_of.setdefault(span.token, number)
        if self.cursor not in self._line_of:
            before = [token for token in self._line_of if token <= self.cursor]
            self._put(max(before) if before else min(self._line_of, default=NO_TOKEN))

    def colour(self, token_styles: Sequence[Style]) -> None:
        """The style of every token of the completion."""
        self._styles = token_styles
        self.refresh()

    @property
    def tokens(self) -> list[int]:
        """Those that are on the page, in order."""
        return sorted(self._line_of)

    def move_to(self, token: int) -> None:
        if token in self._line_of:
            self._put(token)
            self._follow()
            self.refresh()

    def action_token(self, by: int) -> None:
        tokens = self.tokens
        if self.cursor in self._line_of:
            at = tokens.index(self.cursor) + by
            if 0 <= at < len(tokens):
                self.move_to(tokens[at])
        elif tokens:
            self.move_to(tokens[0])

    def action_line(self, by: int) -> None:
        """To the token above or below; a line further where there is none on the screen."""
        here = self._line_of.get(self.cursor)
        if here is None:
            super().action_line(by)
            return
        column, number = self._column(self.cursor, here), here + by
        while 0 <= number < len(self._lines):
            found = self._at(number, column)
            if found is not None:
                if abs(number - here) >= max(2, self.size.height - 1):
                    break
                self.move_to(found)
                return
            number += by
        super().action_line(by * max(1, min(abs(number - here), self.size.height // 2)))

    def action_page(self, by: int) -> None:
        rows = max(1, self.size.height - 1)
        here = self._line_of.get(self.cursor)
        super().action_page(by)
        if here is None:
            return
        column = self._column(self.cursor, here)
        top = int(self.scroll_offset.y)
        numbers = range(top, min(top + rows + 1, len(self._lines)))
        wanted = min(max(here + by * rows, top), top + rows)
        for number in sorted(numbers, key=lambda each: abs(each - wanted)):
            if (found := self._at(number, column)) is not None:
                self._put(found)
                break
        self.refresh()

    def action_first(self) -> None:
        super().action_first()
        if self._line_of:
            self._put(min(self._line_of))
            self.refresh()

    def action_last(self) -> None:
        super().action_last()
        if self._line_of:
            self._put(max(self._line_of))
            self.refresh()

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is None or (number := int(self.scroll_offset.y) + place.y) >= len(self._lines):
            return
        if self._lines[number].fold:
            self.post_message(self.FoldClicked(self._lines[number].fold))
        elif (found := self._at(number, place.x, exactly=True)) is not None:
            self.move_to(found)

    def span_style(self, span: Span) -> Style:
        if span.token < 0:
            return super().span_style(span)
        style = self.rich_style + self._styles[span.token] if span.token < len(self._styles) else self.rich_style
        return style + Style(reverse=True, bold=True) if span.token == self.cursor else style

    def _put(self, token: int) -> None:
        self.cursor = token
        self.post_message(self.CursorMoved(token))

    def _follow(self) -> None:
        number, top, rows = self._line_of[self.cursor], int(self.scroll_offset.y), max(1, self.size.height)
        if number < top + 1 and top:
            self.scroll_to_line(max(0, number - 1))
        elif number >= top + rows:
            self.scroll_to_line(number - rows + 1)

    def _column(self, token: int, number: int) -> int:
        at = 0
        for span in self._lines[number].spans:
            if span.token == token:
                break
            at += cell_len(span.text)
        return at

    def _at(self, number: int, column: int, *, exactly: bool = False) -> int | None:
        """The token at a column of a line, or the nearest before or behind it; None: the line has none."""
        at, found = 0, None
        for span in self._lines[number].spans:
            length = cell_len(span.text)
            if span.token >= 0:
                if at <= column < at + length:
                    return span.token
                if not exactly and (at <= column or found is None):
                    found = span.token
            at += length
        return found
