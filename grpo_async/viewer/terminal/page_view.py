"""A page of lines that scrolls, with a cursor over the tokens in it."""

from __future__ import annotations

from collections.abc import Sequence
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

from grpo_async.viewer.terminal.layout import Line

NO_TOKEN = -1


class PageView(ScrollView, can_focus=True):
    """Shows lines; tokens among them are coloured by `token_styles` and can be walked through."""

    DEFAULT_CSS = "PageView { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("left,h", "token(-1)", "token before"),
        ("right,l", "token(1)", "next token"),
        ("up,k", "line(-1)", "up"),
        ("down,j", "line(1)", "down"),
        ("pageup,ctrl+u", "page(-1)", "page up"),
        ("pagedown,ctrl+d,space", "page(1)", "page down"),
        ("home,g", "first", "first token"),
        ("end,G", "last", "last token"),
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

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.cursor = NO_TOKEN
        self._lines: Sequence[Line] = ()
        self._line_of: dict[int, int] = {}  # token -> its first line
        self._styles: Sequence[Style] = ()
        self._width = 0

    def show(self, lines: Sequence[Line]) -> None:
        """Another page, or the same one laid out anew; the cursor stays on its token where that is still there."""
        self._lines = lines
        self._line_of = {}
        for number, line in enumerate(lines):
            for span in line.spans:
                if span.token >= 0:
                    self._line_of.setdefault(span.token, number)
        self.virtual_size = Size(self.size.width, len(lines))
        if self.cursor not in self._line_of:
            before = [token for token in self._line_of if token <= self.cursor]
            self._put(max(before) if before else min(self._line_of, default=NO_TOKEN))
        self.refresh()

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

    def scroll_to_line(self, number: int) -> None:
        self.scroll_to(y=number, animate=False, immediate=True)

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
            self.scroll_relative(y=by, animate=False, immediate=True)
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
        self.scroll_relative(
            y=by * max(1, min(abs(number - here), self.size.height // 2)), animate=False, immediate=True
        )

    def action_page(self, by: int) -> None:
        rows = max(1, self.size.height - 1)
        here = self._line_of.get(self.cursor)
        self.scroll_relative(y=by * rows, animate=False, immediate=True)
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
        self.scroll_to_line(0)
        if self._line_of:
            self._put(min(self._line_of))
            self.refresh()

    def action_last(self) -> None:
        self.scroll_to_line(len(self._lines))
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

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        number = int(self.scroll_offset.y) + y
        if number >= len(self._lines):
            return Strip.blank(width, base)
        segments = []
        for span in self._lines[number].spans:
            style = base
            if span.token >= 0:
                if span.token < len(self._styles):
                    style = base + self._styles[span.token]
                if span.token == self.cursor:
                    style += Style(reverse=True, bold=True)
            elif span.style:
                style = base + Style.parse(span.style)
            segments.append(Segment(span.text, style))
        return Strip(segments).adjust_cell_length(width, base)

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
