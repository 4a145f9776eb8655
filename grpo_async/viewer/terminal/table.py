"""A table of any length that holds only the pages it shows, and the columns of groups, rollouts and steps.

Rows come from a function that reads a page; those that are not there yet are dots for a moment. textual's DataTable would
hold every row of a run of 100,000 rollouts. The cursor is a row; its keys are those of pagers: arrows, j/k, g/G, pages."""

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
from grpo_async.store.summaries import GroupSummary, RolloutSummary, StepSummary
from grpo_async.viewer.figures import STATUS_STYLES, number, share, signed, span, whole
from grpo_async.viewer.safe_text import one_line

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


_TEXT = 240


def status_cell(status: str, superseded: bool = False) -> Text:
    """A superseded row's status is struck out: it is no part of the run as it now is."""
    style = STATUS_STYLES.get(status, "")
    return Text(status, style=f"{style} strike".strip() if superseded else style)


def bar(value: float | None, low: float, high: float, width: int) -> str:
    """A value between two bounds as a bar of eighths: 0.5 of 0..1 in 4 cells -> '██  '."""
    if value is None or high <= low:
        return " " * width
    eighths = round(max(0.0, min(1.0, (value - low) / (high - low))) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width)


def _matching(row: GroupSummary) -> str:
    return str(row.size) if row.num_matching == row.size else f"{row.num_matching}/{row.size}"


GROUP_COLUMNS: tuple[Column[GroupSummary], ...] = (
    Column(title="step", width=5, sort="step", cell=lambda row: whole(row.step)),
    Column(title="group", width=7, sort="id", cell=lambda row: str(row.group_id)),
    Column(title="status", width=9, sort="status", left=True, cell=lambda row: status_cell(row.status, row.superseded)),
    Column(title="size", width=5, cell=_matching),
    Column(title="reward", width=7, sort="reward", cell=lambda row: number(row.reward_mean)),
    Column(title="std", width=6, sort="std", cell=lambda row: number(row.reward_std), from_width=100),
    Column(title="min", width=6, cell=lambda row: number(row.reward_min), from_width=100),
    Column(title="max", width=6, cell=lambda row: number(row.reward_max), from_width=100),
    Column(title="length", width=7, sort="length", cell=lambda row: number(row.num_tokens_mean, 1)),
    Column(title="trunc", width=6, sort="truncated", cell=lambda row: share(row.num_truncated, row.size)),
    Column(
        title="tools", width=6, cell=lambda row: _tools(row.num_tool_calls, row.num_failed_tool_calls), from_width=120
    ),
    Column(title="stale", width=6, sort="staleness", cell=lambda row: whole(row.staleness), from_width=110),
    Column(title="versions", width=8, cell=lambda row: span(row.version_min, row.version_max), from_width=140),
    Column(title="prompt", width=8, left=True, grows=True, cell=lambda row: one_line(row.prompt_preview, _TEXT)),
)
ROLLOUT_COLUMNS: tuple[Column[RolloutSummary], ...] = (
    Column(title="step", width=5, sort="step", cell=lambda row: whole(row.step)),
    Column(title="rollout", width=9, left=True, cell=lambda row: one_line(row.rollout_id, 24)),
    Column(title="status", width=9, sort="status", left=True, cell=lambda row: status_cell(row.status, row.superseded)),
    Column(title="reward", width=7, sort="reward", cell=lambda row: number(row.reward)),
    Column(title="advant.", width=7, sort="advantage", cell=lambda row: signed(row.advantage)),
    Column(title="length", width=7, sort="length", cell=lambda row: str(row.num_tokens)),
    Column(title="turns", width=5, sort="turns", cell=lambda row: str(row.num_turns), from_width=100),
    Column(
        title="tools", width=6, cell=lambda row: _tools(row.num_tool_calls, row.num_failed_tool_calls), from_width=100
    ),
    Column(title="stale", width=6, sort="staleness", cell=lambda row: whole(row.staleness), from_width=110),
    Column(title="entropy", width=7, sort="entropy", cell=lambda row: number(row.entropy_mean), from_width=130),
    Column(
        title="clipped", width=7, sort="clipped_share", cell=lambda row: _percent(row.clipped_share), from_width=130
    ),
    Column(title="completion", width=10, left=True, grows=True, cell=lambda row: _said(row)),
)
STEP_COLUMNS: tuple[Column[StepSummary], ...] = (
    Column(title="step", width=5, cell=lambda row: whole(row.step)),
    Column(title="groups", width=6, cell=lambda row: str(row.num_groups)),
    Column(title="rollouts", width=8, cell=lambda row: str(row.num_rollouts)),
    Column(title="reward", width=7, cell=lambda row: number(row.reward_mean)),
    Column(title="", width=10, left=True, cell=lambda row: ""),  # the bar; its bounds are those of all steps
    Column(title="std", width=6, cell=lambda row: number(row.reward_std)),
    Column(title="q10..q90", width=13, cell=lambda row: _quantiles(row), from_width=100),
    Column(title="length", width=7, cell=lambda row: number(row.num_tokens_mean, 1)),
    Column(title="trunc", width=6, cell=lambda row: _percent(row.truncated_share)),
    Column(title="failed", width=6, cell=lambda row: _percent(row.failed_share), from_width=100),
    Column(title="stale", width=6, cell=lambda row: number(row.staleness_mean, 1), from_width=90),
    Column(title="entropy", width=7, cell=lambda row: number(row.entropy_mean), from_width=110),
    Column(title="clipped", width=7, cell=lambda row: _percent(row.clipped_share), from_width=120),
    Column(title="groups by status", width=8, left=True, grows=True, cell=lambda row: _statuses(row)),
)


def step_columns(low: float, high: float) -> list[Column[StepSummary]]:
    """STEP_COLUMNS with the bar of the mean reward, from `low` (empty) to `high`."""
    drawn: Column[StepSummary] = Column(
        title="", width=10, left=True, cell=lambda row: Text(bar(row.reward_mean, low, high, 10), style="green")
    )
    return [drawn if column.title == "" else column for column in STEP_COLUMNS]


def history_columns(low: float, high: float) -> list[Column[GroupSummary]]:
    """The groups of one prompt; the bar is the mean reward, from `low` (empty) to `high`."""
    drawn: Column[GroupSummary] = Column(
        title="",
        width=12,
        left=True,
        grows=True,
        cell=lambda row: Text(bar(row.reward_mean, low, high, 12), style="green"),
    )
    return [column for column in GROUP_COLUMNS if column.title != "prompt"] + [drawn]


def _tools(calls: int, failed: int) -> Text:
    """'3', or '3!1' where one of three failed."""
    if calls == 0:
        return Text("-", style="dim")
    return Text(f"{calls}!{failed}", style="red") if failed else Text(str(calls))


def _said(row: RolloutSummary) -> Text:
    if row.error is not None:
        return Text(one_line(row.error, _TEXT), style="red")
    return Text(one_line(row.completion_preview, _TEXT))


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _quantiles(row: StepSummary) -> str:
    return "-" if row.reward_q10 is None else f"{number(row.reward_q10, 2)}..{number(row.reward_q90, 2)}"


def _statuses(row: StepSummary) -> str:
    return " ".join(f"{name} {number_of}" for name, number_of in row.group_statuses.items())
