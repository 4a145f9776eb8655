"""A table of any length that holds only the pages it shows: rows come from a function that reads a page.

Rows that are not there yet are dots for a moment. The cursor is a row; its keys are those of pagers: arrows, j/k, g/G, pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from grpo_async.errors import GrpoAsyncError

Row = TypeVar("Row")
PAGE = 64
"""Rows of one read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """One column: `cell` makes its content of a row; `sort` is the store's name for it, "" where it cannot be sorted by."""

    title: str
    width: int
    cell: Callable[[Row], Text | str]
    sort: str = ""
    left: bool = False
    grows: bool = False  # takes the room that is left
    from_width: int = 0  # is left out of narrower tables


class PagedTable(ScrollView, Generic[Row], can_focus=True):
    """Shows `total` rows by reading pages of them.

    `open` begins a new table; `load(offset, limit)` may raise GrpoAsyncError, which is notified.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"paged-table--cursor", "paged-table--left"}
    DEFAULT_CSS = """
    PagedTable { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }
    PagedTable > .paged-table--cursor { background: $primary 60%; text-style: bold; }
    PagedTable > .paged-table--left { background: $surface; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up,k", "move(-1)", "up"),
        ("down,j", "move(1)", "down"),
        ("pageup,ctrl+u", "page(-1)", "page up"),
        ("pagedown,ctrl+d,space", "page(1)", "page down"),
        ("home,g", "first", "first"),
        ("end,G", "last", "last"),
        ("enter,right,l", "choose", "open"),
    ]

    class Chosen(Message):
        """Enter on a row."""

        def __init__(self, position: int) -> None:
            self.position = position
            super().__init__()

    class HeaderClicked(Message):
        """A click on a column's title."""

        def __init__(self, sort: str) -> None:
            self.sort = sort
            super().__init__()

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.cursor = 0
        self.total = 0
        self.sort = ""
        self._columns: Sequence[Column[Row]] = ()
        self._load: Callable[[int, int], Awaitable[Sequence[Row]]] | None = None
        self._pages: dict[int, Sequence[Row]] = {}
        self._wanted: set[int] = set()
        self._epoch = 0  # pages that were asked for a table that is no more are thrown away

    def open(
        self,
        columns: Sequence[Column[Row]],
        load: Callable[[int, int], Awaitable[Sequence[Row]]],
        total: int,
        *,
        sort: str = "",
        cursor: int = 0,
    ) -> None:
        """Show another table, with the cursor on row `cursor`."""
        self._columns, self._load, self.total, self.sort = columns, load, total, sort
        self._pages.clear()
        self._wanted.clear()
        self._epoch += 1
        self.cursor = max(0, min(cursor, total - 1))
        self._measure()
        self._follow_cursor()
        self.refresh()

    @property
    def columns(self) -> Sequence[Column[Row]]:
        return self._columns

    @property
    def visible_columns(self) -> Sequence[Column[Row]]:
        """Those that the width has room for."""
        return [column for column, _ in self._widths()]

    async def row(self, position: int) -> Row | None:
        """The row at a position, read if need be; None: there is none."""
        if not 0 <= position < self.total or self._load is None:
            return None
        page = position // PAGE
        if page not in self._pages:
            await self._read(page)
        rows = self._pages.get(page, ())
        return rows[position % PAGE] if position % PAGE < len(rows) else None

    def peek(self, position: int) -> Row | None:
        """The row at a position if it has been read."""
        rows = self._pages.get(position // PAGE, ())
        return rows[position % PAGE] if 0 <= position % PAGE < len(rows) else None

    def move_to(self, position: int) -> None:
        if self.total:
            self.cursor = max(0, min(position, self.total - 1))
            self._follow_cursor()
            self.refresh()

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(1, self.size.height - 2))

    def action_first(self) -> None:
        self.move_to(0)

    def action_last(self) -> None:
        self.move_to(self.total - 1)

    def action_choose(self) -> None:
        if self.total:
            self.post_message(self.Chosen(self.cursor))

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            left = 0
            for column, width in self._widths():
                if left <= event.x < left + width and column.sort:
                    self.post_message(self.HeaderClicked(column.sort))
                left += width + 1
            return
        position = self._top() + event.y - 1
        if position < self.total:
            if position == self.cursor:
                self.action_choose()
            self.move_to(position)

    def on_resize(self) -> None:
        self._measure()
        self._follow_cursor()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            return self._header().crop(0, width)
        position = self._top() + y - 1
        base = self.rich_style
        if position >= self.total:
            return Strip.blank(width, base)
        row = self.peek(position)
        if row is None:
            self._want(position // PAGE)
            return Strip([Segment("·", base + Style(dim=True))]).adjust_cell_length(width, base)
        if position == self.cursor:
            base = self.get_component_rich_style(f"paged-table--{'cursor' if self.has_focus else 'left'}")
        segments: list[Segment] = []
        for column, room in self._widths():
            segments.extend(_cell(column, row, room, base))
            segments.append(Segment(" ", base))
        return Strip(segments).adjust_cell_length(width, base)

    def _header(self) -> Strip:
        base = self.rich_style + Style(bold=True)
        segments = []
        for column, room in self._widths():
            mark = "▾" if self.sort == f"-{column.sort}" else "▴" if self.sort == column.sort else ""
            title = f"{column.title}{mark}" if column.sort and mark else column.title
            text = set_cell_size(title, room) if column.left else title[:room].rjust(room)
            style = base + Style(underline=True) if mark and column.sort else base
            segments += [Segment(text, style), Segment(" ", base)]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _widths(self) -> list[tuple[Column[Row], int]]:
        """The columns that fit, with their widths; the growing one takes the rest."""
        room = self.size.width
        shown = [column for column in self._columns if column.from_width <= room]
        rest = room - sum(column.width + 1 for column in shown) + 1
        return [(column, column.width + max(0, rest) if column.grows else column.width) for column in shown]

    def _top(self) -> int:
        return int(self.scroll_offset.y)

    def _measure(self) -> None:
        self.virtual_size = Size(self.size.width, self.total + 1)

    def _follow_cursor(self) -> None:
        rows = max(1, self.size.height - 1)
        top = self._top()
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, immediate=True)
        elif self.cursor >= top + rows:
            self.scroll_to(y=self.cursor - rows + 1, animate=False, immediate=True)

    def _want(self, page: int) -> None:
        if page not in self._wanted:
            self._wanted.add(page)
            self.run_worker(self._read(page), group="pages")

    async def _read(self, page: int) -> None:
        assert self._load is not None
        epoch = self._epoch
        self._wanted.add(page)
        try:
            rows = await self._load(page * PAGE, PAGE)
        except GrpoAsyncError as error:
            self.app.notify(str(error), severity="error", markup=False, timeout=10)
            return
        if epoch == self._epoch:
            self._pages[page] = rows
            self.refresh()


def _cell(column: Column[Row], row: Row, room: int, base: Style) -> list[Segment]:
    content = column.cell(row)
    text = content if isinstance(content, Text) else Text(content)
    style = base + Style.parse(text.style) if isinstance(text.style, str) and text.style else base
    plain = text.plain
    length = cell_len(plain)
    if length > room:
        return [Segment(set_cell_size(plain, max(0, room - 1)) + "…" if room else "", style)]
    padding = " " * (room - length)
    return [Segment(plain + padding if column.left else padding + plain, style)]
