"""Lines of text and tokens in a width, and the widget that shows them with a cursor on a token.

Worked example: flow_tokens([(0, "a"), (1, " bc"), (2, "\\n")], width=3) -> ["a"], [" bc"], ["⏎"]: no token is cut that fits a
line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from grpo_async.utils.safe_text import visible
from grpo_async.viewer.terminal.base import key

END_OF_LINE = "⏎"
NO_TEXT = "∅"  # a token whose text is empty: special ones of some tokenizers
NO_TOKEN = -1
_CONSOLE = Console()  # what rich asks for when it wraps text


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one style. `token` is the index of the completion token it shows, NO_TOKEN where it shows none."""

    text: str  # nothing that a terminal would obey, no line ends
    style: str = ""  # as rich spells it; for tokens empty: their color is looked up when they are drawn
    token: int = NO_TOKEN


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
    return visible(text).replace("\n", END_OF_LINE).replace("\t", "→   ") or NO_TEXT


def flow_tokens(tokens: Iterable[tuple[int, str]], width: int, *, indent: int = 0) -> Iterator[Line]:
    """Lines of tokens (index, text). A line end within a token breaks the line behind it; a token that does not fit goes to the
    next line, and one longer than a line is cut over several."""
    margin = [Span(" " * indent)] if indent else []
    room = max(1, width - indent)
    line, used = list(margin), 0
    for index, text in tokens:
        for piece in filter(None, token_label(text).replace(END_OF_LINE, f"{END_OF_LINE}\n").split("\n")):
            for part in chop_cells(piece, room):
                length = cell_len(part)
                if used and used + length > room:
                    yield Line(tuple(line))
                    line, used = list(margin), 0
                line.append(Span(part, token=index))
                used += length
            if piece.endswith(END_OF_LINE):
                yield Line(tuple(line))
                line, used = list(margin), 0
    if used:
        yield Line(tuple(line))


def flow_text(text: str, width: int, *, indent: int = 0, style: str = "", limit: int | None = None) -> list[Line]:
    """Lines of text, broken at spaces where that is possible; with `limit`, at most that many and one that says how many more."""
    wrapped = Text(visible(text)).wrap(_CONSOLE, max(1, width - indent), tab_size=4, overflow="fold")
    lines = [Line((Span(" " * indent + line.plain, style),)) for line in wrapped]
    if limit is not None and len(lines) > limit + 1:
        rest = f"{' ' * indent}… {len(lines) - limit} more lines"
        return [*lines[:limit], Line((Span(rest, "dim italic"),))]
    return lines


class PageView(ScrollView, can_focus=True, inherit_bindings=False):
    """Shows lines with a cursor on a token; `on_fold` is called with the `fold` of a line that is clicked."""

    DEFAULT_CSS = "PageView { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("left,h", "token(-1)", "the token before"),
        key("right,l", "token(1)", "the next token"),
        key("up,k", "line(-1)", "the token above"),
        key("down,j", "line(1)", "the token below"),
        key("pageup,ctrl+u", "page(-1)", "a page up"),
        key("pagedown,ctrl+d,space", "page(1)", "a page down"),
        key("home,g", "end(-1)", "to the top"),
        key("end,G", "end(1)", "to the end"),
    ]

    cursor = reactive(NO_TOKEN)
    """The token under the cursor; NO_TOKEN: there is none on the page."""

    def __init__(self, on_fold: Callable[[str], None]) -> None:
        super().__init__()
        self.token_styles: Sequence[Style] = ()
        self._on_fold = on_fold
        self._lines: Sequence[Line] = ()
        self._line_of: dict[int, int] = {}  # token -> its first line

    def show(self, lines: Sequence[Line]) -> None:
        """Another page, or the same one laid out again: the cursor stays on its token, or on the one before where that is gone."""
        self._lines = lines
        self._line_of = {}
        for number, line in enumerate(lines):
            for span in line.spans:
                if span.token != NO_TOKEN:
                    self._line_of.setdefault(span.token, number)
        self.virtual_size = Size(self.size.width, len(lines))
        if self.cursor not in self._line_of:
            before = [token for token in self._line_of if token <= self.cursor]
            self.cursor = max(before) if before else min(self._line_of, default=NO_TOKEN)
        self.refresh()

    def color(self, token_styles: Sequence[Style]) -> None:
        """The style of every token of the completion."""
        self.token_styles = token_styles
        self.refresh()

    @property
    def tokens(self) -> list[int]:
        """Those that are on the page, in order."""
        return sorted(self._line_of)

    # -- moving

    @property
    def _top(self) -> int:
        return int(self.scroll_offset.y)

    def _scroll_to_line(self, top: int) -> None:
        self.scroll_to(y=top, animate=False, immediate=True)

    def move_to(self, token: int) -> None:
        if token in self._line_of:
            self.cursor = token
            number, rows = self._line_of[token], max(1, self.size.height)
            if not min(self._top, 1) <= number - self._top < rows:  # the heading above it stays in sight
                self._scroll_to_line(number - 1 if number <= self._top else number - rows + 1)

    def action_token(self, by: int) -> None:
        tokens = self.tokens
        at = tokens.index(self.cursor) + by if self.cursor in self._line_of else 0
        if 0 <= at < len(tokens):
            self.move_to(tokens[at])

    def action_line(self, by: int) -> None:
        """To the token above or below; only the page moves where there is none on the screen."""
        rows, here = max(1, self.size.height), self._line_of.get(self.cursor)
        if here is not None:
            column = self._column(here)
            for number in range(here + by, here + by * max(2, rows - 1), by):
                if (found := self._token_at(number, column)) != NO_TOKEN:
                    self.move_to(found)
                    return
        self._scroll_to_line(self._top + by)

    def action_page(self, by: int) -> None:
        rows, here = max(1, self.size.height - 1), self._line_of.get(self.cursor)
        self._scroll_to_line(self._top + by * rows)
        if here is None:
            return
        column, wanted = self._column(here), min(max(here + by * rows, self._top), self._top + rows)
        for number in sorted(range(self._top, self._top + rows + 1), key=lambda each: abs(each - wanted)):
            if (found := self._token_at(number, column)) != NO_TOKEN:
                self.cursor = found
                return

    def action_end(self, by: int) -> None:
        self._scroll_to_line(0 if by < 0 else len(self._lines))
        if self._line_of:
            self.cursor = min(self._line_of) if by < 0 else max(self._line_of)

    def _column(self, number: int) -> int:
        """Where the token of the cursor begins in its line."""
        at = 0
        for span in self._lines[number].spans:
            if span.token == self.cursor:
                break
            at += cell_len(span.text)
        return at

    def _token_at(self, number: int, column: int) -> int:
        """The token at a column of a line, or the nearest before or behind it; NO_TOKEN: the line has none."""
        at, found = 0, NO_TOKEN
        for span in self._lines[number].spans if 0 <= number < len(self._lines) else ():
            if span.token != NO_TOKEN and (at <= column or found == NO_TOKEN):
                found = span.token
            at += cell_len(span.text)
        return found

    def on_click(self, event: events.Click) -> None:
        clicked = event.style.meta
        if "fold" in clicked:
            self._on_fold(clicked["fold"])
        elif "token" in clicked:
            self.move_to(clicked["token"])

    # -- drawing

    def render_line(self, y: int) -> Strip:
        base, number = self.rich_style, self._top + y
        if number >= len(self._lines):
            return Strip.blank(self.size.width, base)
        line = self._lines[number]
        if line.fold:
            base += Style(meta={"fold": line.fold})
        segments = [Segment(span.text, base + self._style(span)) for span in line.spans]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _style(self, span: Span) -> Style:
        if span.token == NO_TOKEN:
            return Style.parse(span.style)
        style = Style(meta={"token": span.token})
        if span.token < len(self.token_styles):
            style += self.token_styles[span.token]
        return style + Style(reverse=True, bold=True) if span.token == self.cursor else style
