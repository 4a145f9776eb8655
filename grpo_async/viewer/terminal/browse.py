"""The tables of the inspector: groups, rollouts or steps, with a filter.

What is shown stands still while the run writes: it ends at the newest row of the moment it was opened (`seq<=N`). New rows are
announced, and `r` (or another filter, order or view) shows them; with `f` they are shown as they come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Footer, Input, Label, Static

from grpo_async.errors import GrpoAsyncError
from grpo_async.store.query import Query, QueryError, both, parse_query
from grpo_async.store.summaries import GroupSummary, RolloutSummary, StepSummary
from grpo_async.store.table import RolloutTable
from grpo_async.utils.safe_text import visible_line
from grpo_async.utils.text import count
from grpo_async.viewer.paging import newest_seq, query_until
from grpo_async.viewer.terminal.base import InspectorScreen, Session, key
from grpo_async.viewer.terminal.group import GroupScreen
from grpo_async.viewer.terminal.rollout import RolloutScreen
from grpo_async.viewer.terminal.table import GROUP_COLUMNS, ROLLOUT_COLUMNS, Column, PagedTable, step_columns

_LABEL = " filter "
AnyRow = GroupSummary | RolloutSummary | StepSummary
Load = Callable[[int, int], Awaitable[Sequence[AnyRow]]]


class QueryInput(Input):
    """Enter applies, escape leaves it as it was, up and down walk through the earlier ones."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "give_up", "back", show=False),
        Binding("up", "earlier(1)", "earlier", show=False),
        Binding("down", "earlier(-1)", "later", show=False),
    ]

    class GivenUp(Message):
        """Escape was pressed; the query is what it was."""

    def __init__(self, text: str) -> None:
        super().__init__(text, placeholder="everything (/ to filter)", compact=True, select_on_focus=False)
        self.applied = text
        self._earlier: list[str] = []
        self._back = 0

    def accept(self, text: str) -> None:
        """The query holds from now on."""
        self.value = self.applied = text
        self._back = 0
        if text and (not self._earlier or self._earlier[-1] != text):
            self._earlier.append(text)

    def action_give_up(self) -> None:
        self.value = self.applied
        self.post_message(self.GivenUp())

    def action_earlier(self, by: int) -> None:
        self._back = max(0, min(self._back + by, len(self._earlier)))
        self.value = self._earlier[-self._back] if self._back else ""
        self.cursor_position = len(self.value)


class View(StrEnum):
    """What a line of the table is."""

    GROUPS = "groups"
    ROLLOUTS = "rollouts"
    STEPS = "steps"

    @property
    def following(self) -> View:
        views = list(View)
        return views[(views.index(self) + 1) % len(views)]


class BrowseScreen(InspectorScreen):
    """`text` and `sort` are what it starts with; the cursor is on the group `seq`, where one is given."""

    CSS = """
    BrowseScreen #title { height: 1; background: $primary-background; }
    BrowseScreen Horizontal { height: 1; background: $surface; }
    BrowseScreen Label { width: auto; color: $text-muted; }
    BrowseScreen QueryInput { width: 1fr; }
    BrowseScreen #counts { width: auto; padding: 0 1; }
    BrowseScreen #error { display: none; height: auto; color: $text-error; }
    BrowseScreen #news { height: 1; background: $warning-muted; color: $text-warning; display: none; }
    BrowseScreen #empty { height: auto; padding: 1 2; display: none; }
    BrowseScreen #notes { height: auto; max-height: 3; color: $text-warning; padding: 0 1; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        key("slash", "filter", "filter (enter applies, esc leaves it as it was, ↑ ↓ earlier ones)", "filter"),
        key("x", "clear", "no filter"),
        key("s", "sort_next", "sort by the next column", "sort"),
        key("S", "reverse", "turn the order"),
        *[key(str(digit), f"sort_column({digit})", "sort by the n-th column; again: turn") for digit in range(1, 10)],
        key("v,tab", "view", "groups, rollouts, steps", "view"),
        key("r", "renew", "show what the run has written since"),
        key("f", "follow", "follow: show it as it comes", "follow"),
    ]
    TITLE_OF_HELP = "The table"

    def __init__(self, session: Session, text: str, sort: str, *, seq: int | None = None) -> None:
        super().__init__(session)
        self.view = View.GROUPS
        self.sorts = {View.GROUPS: sort, View.ROLLOUTS: sort, View.STEPS: ""}
        self.newest = -1  # seq; the table ends there
        self.following = False
        self._text, self._seq = text, seq
        self._opened = False
        self._refused = ""  # the last query that was wrong

    def compose(self) -> ComposeResult:
        yield Static("", id="title", markup=False)
        with Horizontal():
            yield Label(_LABEL)
            yield QueryInput(self._text)
            yield Label("", id="counts", markup=False)
        for name in ("error", "news", "empty"):
            yield Static("", id=name, markup=False)
        table: PagedTable[AnyRow] = PagedTable(id="rows")
        yield table
        yield Static("", id="notes", markup=False)
        yield Footer(compact=True)

    @property
    def table(self) -> PagedTable[AnyRow]:
        return self.query_one("#rows", PagedTable)

    @property
    def input(self) -> QueryInput:
        return self.query_one(QueryInput)

    def _say(self, place: str, text: str | Text) -> None:
        """Show a text in one of the lines around the table; "" hides the line."""
        line = self.query_one(f"#{place}", Static)
        line.update(text)
        line.display = bool(text)

    def on_mount(self) -> None:
        self.table.focus()
        self._show(self._text)

    # -- what is shown

    def _show(self, text: str) -> None:
        self.run_worker(self.show(text), exclusive=True, group="show")

    async def show(self, text: str, *, cursor: int = 0) -> None:
        """Show the rows of a query, up to the newest of now. A wrong one is refused under the filter line; what is shown stays."""
        session, view, sort = self.session, self.view, self.sorts[self.view] or "-seq"
        superseded = session.with_superseded
        try:
            parse_query(text)
            newest = await session.ask(newest_seq)
            query = query_until(text, newest)
            counts = await session.ask(lambda table: table.count(query, with_superseded=superseded))
            if view is View.STEPS:
                steps = await session.ask(lambda table: table.by_step(query, with_superseded=superseded))
                columns, load, total = self._steps(steps)
            else:
                columns, load = self._pages(view, query, sort)
                total = counts.groups if view is View.GROUPS else counts.rollouts
                await load(0, 1)  # an order that the store does not know is an error here, before the table is changed
            if self._seq is not None:
                before = both(parse_query(text), parse_query(f"seq<{self._seq}"))
                cursor = (await session.ask(lambda table: table.count(before, with_superseded=superseded))).groups
                self._seq = None
        except GrpoAsyncError as problem:
            error = await self._in_the_users_words(text, problem)
            if not self._opened:
                self._opened, self.sorts = True, dict.fromkeys(View, "")
                await self.show("")
            self.input.value = self._refused = text
            self._refuse(error)
            return
        self._opened = True
        self.newest = newest
        self.input.accept(text)
        self._say("error", "")
        self._say("news", "")
        self._say("counts", f"{count(counts.rollouts, 'rollout')} in {count(counts.groups, 'group')}")
        self._say("empty", "" if counts.groups else self._why_empty())
        self.table.display = counts.groups > 0
        self.table.open(columns, load, total, sort=self.sorts[view], cursor=cursor)
        order = "" if view is View.STEPS else self._order_in_words()
        title = f" {session.title}   {view.value}   {order}{'   following' if self.following else ''}"
        self._say("title", Text(title, style="bold", no_wrap=True))
        await self._show_notes()

    def _pages(self, view: View, query: Query, sort: str) -> tuple[Sequence[Column[Any]], Load]:
        """Columns, and what reads the rows."""
        superseded = self.session.with_superseded

        async def load(offset: int, limit: int) -> Sequence[AnyRow]:
            def read(table: RolloutTable) -> Sequence[AnyRow]:
                page: Callable[..., Sequence[AnyRow]] = table.group_page if view is View.GROUPS else table.page
                return page(query, sort=sort, offset=offset, limit=limit, with_superseded=superseded)

            return await self.session.ask(read)

        return GROUP_COLUMNS if view is View.GROUPS else ROLLOUT_COLUMNS, load

    def _steps(self, steps: Sequence[StepSummary]) -> tuple[Sequence[Column[Any]], Load, int]:
        newest_first = sorted(steps, key=lambda step: -1 if step.step is None else step.step, reverse=True)

        async def load(offset: int, limit: int) -> Sequence[AnyRow]:
            return newest_first[offset : offset + limit]

        return step_columns(steps), load, len(steps)

    async def _in_the_users_words(self, text: str, problem: GrpoAsyncError) -> GrpoAsyncError:
        """A mistake found in the query that also says `seq<=N`, at its place in what the user wrote."""
        try:
            query = parse_query(text)
            await self.session.ask(lambda table: table.count(query))
        except GrpoAsyncError as error:
            return error
        return problem

    def _refuse(self, error: GrpoAsyncError) -> None:
        """Show what is wrong with the query; carets stand under the mistake if the error knows its place."""
        if not isinstance(error, QueryError):
            self._say("error", " " + visible_line(str(error), 400))
            return
        left = len(_LABEL) + error.position - int(self.input.scroll_offset.x)
        self._say("error", f"{' ' * max(0, left)}{'^' * error.length}\n {visible_line(error.problem, 400)}")

    def _order_in_words(self) -> str:
        """'by reward, highest first'."""
        order = self.sorts[self.view]
        if not order:
            return "newest first"
        field = order.removeprefix("-")
        title = next((column.title for column in self.table.columns if column.sort == field), field)
        return f"by {title}, {'highest' if order.startswith('-') else 'lowest'} first"

    def _why_empty(self) -> str:
        if self.newest < 0:
            return (
                f"{self.session.run.root} has no rollouts yet; the first appear with the first groups that are done.\n"
                "This page shows them when they are there."
            )
        return "No rollout is like that. x takes the filter away, / changes it, ? shows what can be asked."

    # -- growth

    def refreshed(self, has_grown: bool) -> None:
        """Called whenever the store was refreshed; `has_grown`: it has new rows."""
        self.run_worker(self._after_refresh(has_grown), exclusive=True, group="growth")

    async def _after_refresh(self, has_grown: bool) -> None:
        """Announce new rows, or show them: where nothing was there before, and when following."""
        if has_grown and (self.newest < 0 or self.following):
            await self.show(self.input.applied, cursor=0 if self.following else self.table.cursor)
        elif has_grown:
            new = both(parse_query(self.input.applied), parse_query(f"seq>{self.newest}"))
            found = await self.ask(lambda table: table.count(new, with_superseded=self.session.with_superseded))
            if found is not None and found.groups:
                them = "it" if found.groups == 1 else "them"
                self._say("news", f" {count(found.groups, 'new group')} since: r shows {them}, f follows")
        await self._show_notes()

    async def _show_notes(self) -> None:
        """What a reader must know of the store; an empty one says that itself."""
        found = await self.ask(lambda table: table.notes)
        if found is not None:
            self._say("notes", "\n".join(visible_line(note, 300) for note in found) if self.newest >= 0 else "")

    def action_renew(self) -> None:
        self._show(self.input.applied)

    def action_follow(self) -> None:
        self.following = not self.following
        self.action_renew()

    # -- filter, order, view

    def action_filter(self) -> None:
        self.input.focus()

    def action_clear(self) -> None:
        self._show("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.run_worker(self._apply(event.value.strip()), exclusive=True, group="show")

    async def _apply(self, text: str) -> None:
        await self.show(text)
        if self.input.applied == text:
            self.table.focus()

    def on_input_changed(self) -> None:
        if self.input.value != self._refused:
            self._say("error", "")

    def on_query_input_given_up(self) -> None:
        self._say("error", "")
        self.table.focus()

    def action_view(self) -> None:
        self.view = self.view.following
        self.action_renew()

    def _sortable(self) -> list[str]:
        return [column.sort for column in self.table.visible_columns if column.sort]

    def action_sort_next(self) -> None:
        """Newest first -> each column in turn, highest first -> newest first."""
        orders = ["", *self._sortable()]
        now = self.sorts[self.view].removeprefix("-")
        following = orders[(orders.index(now) + 1) % len(orders)] if now in orders else ""
        self._sort(f"-{following}" if following else "")

    def action_reverse(self) -> None:
        now = self.sorts[self.view] or "-seq"
        self._sort(now.removeprefix("-") if now.startswith("-") else f"-{now}")

    def action_sort_column(self, number: int) -> None:
        fields = self._sortable()
        if number <= len(fields):
            self._sort_by(fields[number - 1])

    def on_paged_table_header_clicked(self, event: PagedTable.HeaderClicked) -> None:
        self._sort_by(event.sort)

    def _sort_by(self, field: str) -> None:
        self._sort(field if self.sorts[self.view] == f"-{field}" else f"-{field}")

    def _sort(self, order: str) -> None:
        if self.view is not View.STEPS:
            self.sorts[self.view] = order
            self.action_renew()

    # -- onwards

    def on_paged_table_chosen(self) -> None:
        self.run_worker(self._open(), exclusive=True, group="open")

    async def _open(self) -> None:
        row = await self.table.row(self.table.cursor)
        match row:
            case GroupSummary():
                self.app.push_screen(GroupScreen(self.session, row.seq, "", self.walk))
            case RolloutSummary():
                self.app.push_screen(RolloutScreen(self.session, row.seq, row.rollout_id, self.walk))
            case StepSummary():
                text = self.input.applied
                self.view = View.GROUPS
                await self.show(f"({text}) and {_of_step(row)}" if text else _of_step(row))

    async def walk(self, by: int) -> tuple[int, str] | None:
        row = await self.table.walk(by)
        match row:
            case GroupSummary():
                return row.seq, ""
            case RolloutSummary():
                return row.seq, row.rollout_id
        return None

    def prompt(self) -> tuple[str, int] | None:
        row = self.table.current
        return (row.prompt_hash, row.seq) if isinstance(row, GroupSummary | RolloutSummary) else None

    def subject(self) -> tuple[str, list[str]] | None:
        row = self.table.current
        match row:
            case GroupSummary():
                return str(row.group_id), ["--group", str(row.group_id)]
            case RolloutSummary():
                return row.rollout_id, ["--rollout", row.rollout_id]
            case StepSummary():
                return str(row.step), [_of_step(row)]
        return None


def _of_step(row: StepSummary) -> str:
    """The query of its groups."""
    return "step IS NULL" if row.step is None else f"step={row.step}"
