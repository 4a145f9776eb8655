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
from grpo_async.utils.safe_text import visible_line
from grpo_async.utils.text import percent
from grpo_async.viewer.format import STATUS_STYLES, fraction, number, or_dash, signed, span
from grpo_async.viewer.terminal.base import key

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


class PagedTable(ScrollView, Generic[Row], can_focus=True, inherit_bindings=False):
    """Shows `total` rows by reading pages of them.

    `open` shows a new table; its `load(offset, limit)` may raise GrpoAsyncError, which is notified.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"paged-table--cursor", "paged-table--left"}
    DEFAULT_CSS = """
    PagedTable { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; }
    PagedTable > .paged-table--cursor { background: $primary 60%; text-style: bold; }
    PagedTable > .paged-table--left { background: $surface; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter,right,l", "choose", "open the group, the rollout, or the groups of the step", "open"),
        key("up,k", "move(-1)", "one row up"),
        key("down,j", "move(1)", "one row down"),
        key("pageup,ctrl+u", "page(-1)", "a page up"),
        key("pagedown,ctrl+d,space", "page(1)", "a page down"),
        key("home,g", "move_to(0)", "to the first row"),
        key("end,G", "move_to(-1)", "to the last row"),
    ]

    class Chosen(Message):
        """Enter on a row, or a click on that of the cursor."""

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
        self.columns: Sequence[Column[Row]] = ()
        self._load: Callable[[int, int], Awaitable[Sequence[Row]]] | None = None
        self._pages: dict[int, Sequence[Row]] = {}
        self._wanted: set[int] = set()
        self._epoch = 0  # pages that were asked for a table that is gone are thrown away

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
        self.columns, self._load, self.total, self.sort = columns, load, total, sort
        self._pages.clear()
        self._wanted.clear()
        self._epoch += 1
        self.cursor = max(0, min(cursor, total - 1))
        self.on_resize()
        self.refresh()

    @property
    def visible_columns(self) -> Sequence[Column[Row]]:
        """Those that the width has room for."""
        return [column for column, _ in self._widths()]

    async def row(self, position: int) -> Row | None:
        """The row at a position, read if need be; None: there is none."""
        if not 0 <= position < self.total:
            return None
        if position // PAGE not in self._pages:
            await self._read(position // PAGE)
        return self.peek(position)

    def peek(self, position: int) -> Row | None:
        """The row at a position if it has been read."""
        rows = self._pages.get(position // PAGE, ())
        return rows[position % PAGE] if 0 <= position % PAGE < len(rows) else None

    @property
    def current(self) -> Row | None:
        """The row of the cursor if it has been read."""
        return self.peek(self.cursor)

    async def walk(self, by: int) -> Row | None:
        """Move the cursor by some rows; the row that is there, None where the table ends."""
        row = await self.row(self.cursor + by)
        if row is not None:
            self.move_to(self.cursor + by)
        return row

    def move_to(self, position: int) -> None:
        if self.total:
            self.cursor = max(0, min(position, self.total - 1))
            self._follow_cursor()
            self.refresh()

    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.move_to(self.cursor + by * max(1, self.size.height - 2))

    def action_move_to(self, position: int) -> None:
        self.move_to(position if position >= 0 else self.total + position)

    def action_choose(self) -> None:
        if self.total:
            self.post_message(self.Chosen())

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            left = 0
            for column, width in self._widths():
                if left <= event.x < left + width and column.sort:
                    self.post_message(self.HeaderClicked(column.sort))
                left += width + 1
            return
        position = self._top() + event.y - 1
        if position == self.cursor:
            self.action_choose()
        elif position < self.total:
            self.move_to(position)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, self.total + 1)
        self._follow_cursor()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            return self._header()
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
            segments += [_cell(column, row, room, base), Segment(" ", base)]
        return Strip(segments).adjust_cell_length(width, base)

    def _header(self) -> Strip:
        base = self.rich_style + Style(bold=True)
        segments = []
        for column, room in self._widths():
            arrow = "▾" if self.sort == f"-{column.sort}" else "▴" if self.sort == column.sort else ""
            title = f"{column.title}{arrow}" if column.sort else column.title
            text = set_cell_size(title, room) if column.left else title[:room].rjust(room)
            style = base + Style(underline=True) if arrow and column.sort else base
            segments += [Segment(text, style), Segment(" ", base)]
        return Strip(segments).adjust_cell_length(self.size.width, base)

    def _widths(self) -> list[tuple[Column[Row], int]]:
        """The columns that fit, with their widths; the growing one takes the rest."""
        room = self.size.width
        shown = [column for column in self.columns if column.from_width <= room]
        rest = room - sum(column.width + 1 for column in shown) + 1
        return [(column, column.width + max(0, rest) if column.grows else column.width) for column in shown]

    def _top(self) -> int:
        return int(self.scroll_offset.y)

    def _follow_cursor(self) -> None:
        rows = max(1, self.size.height - 1)
        top = max(self.cursor - rows + 1, min(self._top(), self.cursor))
        if top != self._top():
            self.scroll_to(y=top, animate=False, immediate=True)

    def _want(self, page: int) -> None:
        if page not in self._wanted:
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


def _cell(column: Column[Row], row: Row, room: int, base: Style) -> Segment:
    content = column.cell(row)
    text = content if isinstance(content, Text) else Text(content)
    style = base + Style.parse(text.style) if isinstance(text.style, str) and text.style else base
    plain = text.plain
    length = cell_len(plain)
    if length > room:
        return Segment(set_cell_size(plain, max(0, room - 1)) + "…" if room else "", style)
    padding = " " * (room - length)
    return Segment(plain + padding if column.left else padding + plain, style)


_TEXT = 240


def bar(value: float | None, low: float, high: float, width: int) -> str:
    """A value between two bounds as a bar of eighths: 0.5 of 0..1 in 4 cells -> '██  '."""
    if value is None or high <= low:
        return " " * width
    eighths = round(max(0.0, min(1.0, (value - low) / (high - low))) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width)


def _status(row: GroupSummary | RolloutSummary) -> Text:
    """A superseded row's status is struck out: it is not part of the run as it now is."""
    style = STATUS_STYLES.get(row.status, "")
    return Text(row.status, style=f"{style} strike".strip() if row.superseded else style)


def _tools(row: GroupSummary | RolloutSummary) -> Text:
    """'3', or '3!1' where one of three failed."""
    calls, failed = row.num_tool_calls, row.num_failed_tool_calls
    if calls == 0:
        return Text("-", style="dim")
    return Text(f"{calls}!{failed}", style="red") if failed else Text(str(calls))


def _completion(row: RolloutSummary) -> Text:
    if row.error is not None:
        return Text(visible_line(row.error, _TEXT), style="red")
    return Text(visible_line(row.completion_preview, _TEXT))


def _size(row: GroupSummary) -> str:
    return str(row.size) if row.num_matching == row.size else f"{row.num_matching}/{row.size}"


def _truncated(row: GroupSummary) -> str:
    return fraction(row.num_truncated, row.size)


def _quantiles(row: StepSummary) -> str:
    return "-" if row.reward_q10 is None else f"{number(row.reward_q10, 2)}..{number(row.reward_q90, 2)}"


def _statuses(row: StepSummary) -> str:
    return " ".join(f"{name} {number_of}" for name, number_of in row.group_statuses.items())


GROUP_COLUMNS: tuple[Column[GroupSummary], ...] = (
    Column(title="step", width=5, sort="step", cell=lambda row: or_dash(row.step)),
    Column(title="group", width=7, sort="id", cell=lambda row: str(row.group_id)),
    Column(title="status", width=9, sort="status", left=True, cell=_status),
    Column(title="size", width=5, cell=_size),
    Column(title="reward", width=7, sort="reward", cell=lambda row: number(row.reward_mean)),
    Column(title="std", width=6, sort="std", cell=lambda row: number(row.reward_std), from_width=100),
    Column(title="min", width=6, cell=lambda row: number(row.reward_min), from_width=100),
    Column(title="max", width=6, cell=lambda row: number(row.reward_max), from_width=100),
    Column(title="length", width=7, sort="length", cell=lambda row: number(row.num_tokens_mean, 1)),
    Column(title="trunc", width=6, sort="truncated", cell=_truncated),
    Column(title="tools", width=6, cell=_tools, from_width=120),
    Column(title="stale", width=6, sort="staleness", cell=lambda row: or_dash(row.staleness), from_width=110),
    Column(title="versions", width=8, cell=lambda row: span(row.version_min, row.version_max), from_width=140),
    Column(title="prompt", width=8, left=True, grows=True, cell=lambda row: visible_line(row.prompt_preview, _TEXT)),
)
ROLLOUT_COLUMNS: tuple[Column[RolloutSummary], ...] = (
    Column(title="step", width=5, sort="step", cell=lambda row: or_dash(row.step)),
    Column(title="rollout", width=9, left=True, cell=lambda row: visible_line(row.rollout_id, 24)),
    Column(title="status", width=9, sort="status", left=True, cell=_status),
    Column(title="reward", width=7, sort="reward", cell=lambda row: number(row.reward)),
    Column(title="advant.", width=7, sort="advantage", cell=lambda row: signed(row.advantage)),
    Column(title="length", width=7, sort="length", cell=lambda row: str(row.num_tokens)),
    Column(title="turns", width=5, sort="turns", cell=lambda row: str(row.num_turns), from_width=100),
    Column(title="tools", width=6, cell=_tools, from_width=100),
    Column(title="stale", width=6, sort="staleness", cell=lambda row: or_dash(row.staleness), from_width=110),
    Column(title="entropy", width=7, sort="entropy", cell=lambda row: number(row.entropy_mean), from_width=130),
    Column(
        title="clipped",
        width=7,
        sort="clipped_fraction",
        cell=lambda row: or_dash(row.clipped_fraction, percent),
        from_width=130,
    ),
    Column(title="completion", width=10, left=True, grows=True, cell=_completion),
)


def step_columns(steps: Sequence[StepSummary]) -> tuple[Column[StepSummary], ...]:
    """With a bar of the mean reward, from 0 or the lowest of `steps` (empty) to the highest."""
    means = [step.reward_mean for step in steps if step.reward_mean is not None]
    low, high = min([0.0, *means]), max(means, default=0.0)
    return (
        Column(title="step", width=5, cell=lambda row: or_dash(row.step)),
        Column(title="groups", width=6, cell=lambda row: str(row.num_groups)),
        Column(title="rollouts", width=8, cell=lambda row: str(row.num_rollouts)),
        Column(title="reward", width=7, cell=lambda row: number(row.reward_mean)),
        Column(title="", width=10, cell=lambda row: Text(bar(row.reward_mean, low, high, 10), style="green")),
        Column(title="std", width=6, cell=lambda row: number(row.reward_std)),
        Column(title="q10..q90", width=13, cell=_quantiles, from_width=100),
        Column(title="length", width=7, cell=lambda row: number(row.num_tokens_mean, 1)),
        Column(title="trunc", width=6, cell=lambda row: or_dash(row.truncated_fraction, percent)),
        Column(title="failed", width=6, cell=lambda row: or_dash(row.failed_fraction, percent), from_width=100),
        Column(title="stale", width=6, cell=lambda row: number(row.staleness_mean, 1), from_width=90),
        Column(title="entropy", width=7, cell=lambda row: number(row.entropy_mean), from_width=110),
        Column(title="clipped", width=7, cell=lambda row: or_dash(row.clipped_fraction, percent), from_width=120),
        Column(title="groups by status", width=8, left=True, grows=True, cell=_statuses),
    )
