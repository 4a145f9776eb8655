"""The tables of the inspector: the first screen (groups, rollouts or steps) with its filter, and one prompt over the steps.

What is shown stands still while the run writes: it ends at the newest row of the moment it was opened (`seq<=N`). New rows are
announced, and `r` (or another filter, order or view) shows them; with `f` they are shown as they come."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, Label, Static

from grpo_async.errors import GrpoAsyncError
from grpo_async.store.query import EVERYTHING, Query, QueryError, both, parse_query
from grpo_async.store.summaries import GroupSummary, RolloutSummary, StepSummary
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.figures import count, number, signed
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.terminal.base import InspectorScreen, Keys
from grpo_async.viewer.terminal.table import (
    GROUP_COLUMNS,
    ROLLOUT_COLUMNS,
    Column,
    PagedTable,
    history_columns,
    step_columns,
)

_PROMPT = " filter "


class QueryInput(Input):
    """Enter applies, escape leaves it as it was, up and down walk through the earlier ones."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "give_up", "back", show=False),
        Binding("up", "earlier(1)", "earlier", show=False),
        Binding("down", "earlier(-1)", "later", show=False),
    ]

    class GivenUp(Message):
        """Escape was pressed."""

    def __init__(self, text: str) -> None:
        super().__init__(text, placeholder="everything (/ to filter)", compact=True, select_on_focus=False)
        self.applied = text
        self.earlier: list[str] = []
        self._back = 0

    def remember(self, text: str) -> None:
        self.applied = text
        self._back = 0
        if text and (not self.earlier or self.earlier[-1] != text):
            self.earlier.append(text)

    def action_give_up(self) -> None:
        self.value = self.applied
        self.post_message(self.GivenUp())

    def action_earlier(self, by: int) -> None:
        self._back = max(0, min(self._back + by, len(self.earlier)))
        self.value = self.earlier[-self._back] if self._back else ""
        self.cursor_position = len(self.value)


class FilterLine(Vertical):
    """The query and its error. Posts `Applied` with the text on enter; whoever takes it calls `accept` or `refuse`."""

    DEFAULT_CSS = """
    FilterLine { height: auto; }
    FilterLine Horizontal { height: 1; background: $surface; }
    FilterLine Label { width: auto; color: $text-muted; }
    FilterLine QueryInput { width: 1fr; }
    FilterLine #counts { width: auto; padding: 0 1; }
    FilterLine #error { display: none; height: auto; color: $text-error; }
    """

    class Applied(Message):
        """Enter was pressed."""

        def __init__(self, text: str) -> None:
            self.text = text
            super().__init__()

    class Left(Message):
        """Escape was pressed; the query is what it was."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._start = text

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(_PROMPT)
            yield QueryInput(self._start)
            yield Label("", id="counts", markup=False)
        yield Static("", id="error", markup=False)

    @property
    def input(self) -> QueryInput:
        return self.query_one(QueryInput)

    @property
    def text(self) -> str:
        """The query that holds."""
        return self.input.applied

    def put(self, text: str) -> None:
        """Show a query that came from elsewhere, as typed."""
        self.input.value = text

    def say(self, counts: str) -> None:
        self.query_one("#counts", Label).update(counts)

    def accept(self, text: str) -> None:
        """The query holds from now on."""
        self.input.remember(text)
        self.input.value = text
        self.query_one("#error").display = False

    def refuse(self, error: Exception) -> None:
        """Show what is wrong; carets stand under the mistake if the error knows its place."""
        lines = Text()
        if isinstance(error, QueryError):
            left = len(_PROMPT) + error.position - int(self.input.scroll_offset.x)
            lines.append(" " * max(0, left) + "^" * error.length + "\n")
            near = f"; did you mean {' or '.join(error.suggestions)}?" if error.suggestions else ""
            known = "" if near and near in error.problem else near
            said = error.problem if any(name in error.problem for name in error.suggestions) else error.problem + known
            lines.append(" " + one_line(said, 400))
        else:
            lines.append(" " + one_line(str(error), 400))
        shown = self.query_one("#error", Static)
        shown.update(lines)
        shown.display = True

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Applied(event.value.strip()))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.query_one("#error").display = False

    def on_query_input_given_up(self, event: QueryInput.GivenUp) -> None:
        event.stop()
        self.query_one("#error").display = False
        self.post_message(self.Left())


AnyRow = GroupSummary | RolloutSummary | StepSummary


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
    """`text` and `sort` are those of the command line."""

    CSS = """
    BrowseScreen #title { height: 1; background: $primary-background; }
    BrowseScreen #news { height: 1; background: $warning-muted; color: $text-warning; display: none; }
    BrowseScreen #empty { height: auto; padding: 1 2; display: none; }
    BrowseScreen #notes { height: auto; max-height: 3; color: $text-warning; padding: 0 1; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter"),
        Binding("s", "sort_next", "sort"),
        Binding("S", "reverse", "reverse"),
        *[Binding(str(digit), f"sort_column({digit})", show=False) for digit in range(1, 10)],
        Binding("v,tab", "view", "groups, rollouts, steps"),
        Binding("b", "bars", "histograms"),
        Binding("o", "other_steps", "the prompt at other steps"),
        Binding("r", "renew", "show new rows"),
        Binding("f", "follow", "follow"),
        Binding("x", "clear", "no filter"),
    ]
    TITLE_OF_HELP = "The table"
    KEYS = (
        ("↑ ↓ j k", "one row; page up/down, ctrl+u/ctrl+d; g G: first, last"),
        ("enter →  l", "open the group, the rollout, or the groups of the step"),
        ("/", "filter (enter applies, esc leaves it as it was, ↑ ↓ earlier ones); x takes it away"),
        ("s S 1..9", "sort by the next column, turn the order, sort by the n-th column (again: turn)"),
        ("v tab", "groups, rollouts, steps"),
        ("b", "histograms of reward, staleness, length, ... of what the filter lets through"),
        ("o", "the prompt of the row at other steps"),
        ("r f", "show what the run has written since; follow: show it as it comes"),
        ("y Y", "copy the id; copy the command line that shows it again"),
    )

    def __init__(self, text: str, sort: str) -> None:
        super().__init__()
        self.view = View.GROUPS
        self.sorts = {View.GROUPS: sort, View.ROLLOUTS: sort, View.STEPS: ""}
        self.newest = -1  # seq; the table ends there
        self.num_new = 0
        self.following = False
        self._start = text
        self._opened = False

    def compose(self) -> ComposeResult:
        yield Static("", id="title", markup=False)
        yield FilterLine(self._start)
        yield Static("", id="news", markup=False)
        yield Static("", id="empty", markup=False)
        table: PagedTable[AnyRow] = PagedTable(id="rows")
        yield table
        yield Static("", id="notes", markup=False)
        yield Keys(("enter", "open"), ("/", "filter"), ("s", "sort"), ("v", "view"), ("b", "bars"), ("f", "follow"))

    @property
    def table(self) -> PagedTable[AnyRow]:
        return self.query_one("#rows", PagedTable)

    @property
    def filter_line(self) -> FilterLine:
        return self.query_one(FilterLine)

    def on_mount(self) -> None:
        self.table.focus()
        self.run_worker(self.show(self._start), exclusive=True, group="show")

    # -- what is shown

    async def show(self, text: str, *, cursor: int = 0) -> None:
        """Show the rows of a query, up to the newest of now. A wrong one is refused under the filter line; what is shown stays."""
        try:
            parse_query(text)
            newest = await self.session.ask(self._newest)
            query = _until(newest, text)
            sort, view = self.sorts[self.view] or "-seq", self.view
            superseded = self.session.with_superseded
            counts = await self.session.ask(lambda table: table.count(query, with_superseded=superseded))
            if view is View.STEPS:
                steps = await self.session.ask(lambda table: table.by_step(query, with_superseded=superseded))
            else:
                steps = []
            await self._first_page(view, query, sort)
        except GrpoAsyncError as problem:
            error = await self._in_the_users_words(text, problem)
            self.filter_line.put(text)
            self.filter_line.refuse(error)
            if not self._opened:
                self._opened = True
                self.sorts = dict.fromkeys(View, "")
                await self.show("")
                self.filter_line.put(text)
                self.filter_line.refuse(error)
            return
        self._opened = True
        self.newest, self.num_new = newest, 0
        self.filter_line.accept(text)
        self.filter_line.say(f"{count(counts.rollouts, 'rollout')} in {count(counts.groups, 'group')}")
        self._open_table(view, query, sort, steps, counts.groups, counts.rollouts, cursor)
        self._say_what_is_shown(counts.groups)
        await self._take_notes()

    async def _in_the_users_words(self, text: str, problem: GrpoAsyncError) -> GrpoAsyncError:
        """A mistake found in the query that also says `seq<=N`, at its place in what the user wrote."""
        try:
            query = parse_query(text)
            await self.session.ask(lambda table: table.count(query))
        except GrpoAsyncError as error:
            return error
        return problem

    def _newest(self, table: RolloutTable) -> int:
        rows = table.group_page(EVERYTHING, sort="-seq", limit=1, with_superseded=True)
        return rows[0].seq if rows else -1

    async def _first_page(self, view: View, query: Query, sort: str) -> None:
        """A sort order that the store does not know is an error here, before the table is changed."""
        if view is View.GROUPS:
            await self.session.ask(lambda table: table.group_page(query, sort=sort, limit=1))
        elif view is View.ROLLOUTS:
            await self.session.ask(lambda table: table.page(query, sort=sort, limit=1))

    def _open_table(
        self, view: View, query: Query, sort: str, steps: Sequence[StepSummary], groups: int, rollouts: int, cursor: int
    ) -> None:
        superseded = self.session.with_superseded

        async def load_groups(offset: int, limit: int) -> Sequence[AnyRow]:
            return await self.session.ask(
                lambda table: table.group_page(query, sort=sort, offset=offset, limit=limit, with_superseded=superseded)
            )

        async def load_rollouts(offset: int, limit: int) -> Sequence[AnyRow]:
            return await self.session.ask(
                lambda table: table.page(query, sort=sort, offset=offset, limit=limit, with_superseded=superseded)
            )

        async def load_steps(offset: int, limit: int) -> Sequence[AnyRow]:
            return newest_first[offset : offset + limit]

        newest_first = sorted(steps, key=lambda step: -1 if step.step is None else step.step, reverse=True)
        columns: Sequence[Column[AnyRow]]
        match view:
            case View.GROUPS:
                columns, load, total = _any(GROUP_COLUMNS), load_groups, groups
            case View.ROLLOUTS:
                columns, load, total = _any(ROLLOUT_COLUMNS), load_rollouts, rollouts
            case View.STEPS:
                means = [step.reward_mean for step in steps if step.reward_mean is not None]
                columns = _any(step_columns(min([0.0, *means]), max(means, default=0.0)))
                load, total = load_steps, len(steps)
        self.table.open(columns, load, total, sort=self.sorts[view], cursor=cursor)

    def _say_what_is_shown(self, num_groups: int) -> None:
        order = "" if self.view is View.STEPS else self._order_in_words()
        following = "   following" if self.following else ""
        title = f" {self.session.title}   {self.view.value}   {order}{following}"
        self.query_one("#title", Static).update(Text(title, style="bold", no_wrap=True))
        empty = self.query_one("#empty", Static)
        empty.display = num_groups == 0
        self.table.display = num_groups > 0
        if num_groups == 0:
            empty.update(self._why_empty())
        self.query_one("#news", Static).display = False

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

    def grown(self) -> None:
        self.run_worker(self._take_growth(), exclusive=True, group="growth")

    def looked(self) -> None:
        self.run_worker(self._take_notes(), exclusive=True, group="notes")

    async def _take_notes(self) -> None:
        """What a reader must know of the store; an empty one says that itself."""
        found = await self.ask(lambda table: table.notes)
        if found is not None:
            notes = self.query_one("#notes", Static)
            notes.display = bool(found) and self.newest >= 0
            notes.update(Text("\n".join(one_line(note, 300) for note in found)))

    async def _take_growth(self) -> None:
        """Announce what came since, or show it: where nothing was there before, and when following."""
        if self.newest < 0 or self.following:
            await self._renew()
            return
        text = self.filter_line.text
        new = both(parse_query(text), parse_query(f"seq>{self.newest}"))
        found = await self.ask(lambda table: table.count(new, with_superseded=self.session.with_superseded))
        if found is None or found.groups == 0:
            return
        self.num_new = found.groups
        news = self.query_one("#news", Static)
        news.update(
            f" {count(found.groups, 'new group')} since: r shows {'it' if found.groups == 1 else 'them'}, f follows"
        )
        news.display = True

    async def _renew(self) -> None:
        """The newest rows, with the cursor on the row it was on, or on the first when it was there."""
        await self.show(self.filter_line.text, cursor=0 if self.following else self.table.cursor)

    def action_renew(self) -> None:
        self.run_worker(self.show(self.filter_line.text), exclusive=True, group="show")

    def action_follow(self) -> None:
        self.following = not self.following
        self.action_renew()

    # -- filter, order, view

    def action_filter(self) -> None:
        self.filter_line.input.focus()

    def action_clear(self) -> None:
        self.run_worker(self.show(""), exclusive=True, group="show")

    def on_filter_line_applied(self, event: FilterLine.Applied) -> None:
        self.run_worker(self._apply(event.text), exclusive=True, group="show")

    async def _apply(self, text: str) -> None:
        await self.show(text)
        if self.filter_line.text == text:
            self.table.focus()

    def on_filter_line_left(self) -> None:
        self.table.focus()

    def action_view(self) -> None:
        self.view = self.view.following
        self.run_worker(self.show(self.filter_line.text), exclusive=True, group="show")

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
            self.run_worker(self.show(self.filter_line.text), exclusive=True, group="show")

    # -- onwards

    def on_paged_table_chosen(self, event: PagedTable.Chosen) -> None:
        self.run_worker(self._open(event.position), exclusive=True, group="open")

    async def _open(self, position: int) -> None:
        row = await self.table.row(position)
        match row:
            case GroupSummary():
                self.inspector.open_group(row.seq, self.walk_groups)
            case RolloutSummary():
                self.inspector.open_rollout(row.seq, row.rollout_id, self.walk_rollouts)
            case StepSummary():
                where = "step IS NULL" if row.step is None else f"step={row.step}"
                text = self.filter_line.text
                self.view = View.GROUPS
                await self.show(f"({text}) and {where}" if text else where)
            case None:
                pass

    async def walk_groups(self, by: int) -> int | None:
        """Move the cursor; the seq of the group that is there, None where the table ends."""
        row = await self._step(by)
        return row.seq if isinstance(row, GroupSummary) else None

    async def walk_rollouts(self, by: int) -> tuple[int, str] | None:
        """Move the cursor; the seq and id of the rollout that is there, None where the table ends."""
        row = await self._step(by)
        return (row.seq, row.rollout_id) if isinstance(row, RolloutSummary) else None

    async def _step(self, by: int) -> AnyRow | None:
        row = await self.table.row(self.table.cursor + by)
        if row is not None:
            self.table.move_to(self.table.cursor + by)
        return row

    def action_bars(self) -> None:
        self.inspector.open_bars(self.filter_line.text, _until(self.newest, self.filter_line.text))

    def action_other_steps(self) -> None:
        row = self.table.peek(self.table.cursor)
        if isinstance(row, GroupSummary | RolloutSummary):
            self.inspector.open_history(row.prompt_hash, row.seq)

    def subject(self) -> tuple[str, list[str]] | None:
        row = self.table.peek(self.table.cursor)
        match row:
            case GroupSummary():
                return str(row.group_id), ["--group", str(row.group_id)]
            case RolloutSummary():
                return row.rollout_id, ["--rollout", row.rollout_id]
            case StepSummary():
                return str(row.step), ["--step", str(row.step)]
        return None


def _until(newest: int, text: str) -> Query:
    """What `text` holds for up to the seq `newest`."""
    return both(parse_query(text), parse_query(f"seq<={newest}"))


def _any(columns: Sequence[Column[Any]]) -> Sequence[Column[AnyRow]]:
    """The table holds rows of one kind at a time, and its columns are those of that kind."""
    return columns


class HistoryScreen(InspectorScreen):
    """The groups of one prompt in the order of writing; the cursor begins on that of `seq`."""

    CSS = "HistoryScreen #head { height: auto; max-height: 4; background: $surface; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = []
    TITLE_OF_HELP = "One prompt over the steps"
    KEYS = (
        ("↑ ↓ j k", "one group; g G: first, last"),
        ("enter", "open the group side by side"),
        ("y Y", "copy the id; copy the command line that shows the group again"),
    )

    def __init__(self, prompt_hash: str, seq: int) -> None:
        super().__init__()
        self._prompt_hash, self._seq = prompt_hash, seq

    def compose(self) -> ComposeResult:
        yield Static("", id="head", markup=False)
        table: PagedTable[GroupSummary] = PagedTable()
        yield table
        yield Keys(("enter", "open"), ("y", "copy"))

    @property
    def table(self) -> PagedTable[GroupSummary]:
        return self.query_one(PagedTable)

    def on_mount(self) -> None:
        self.table.focus()
        self.run_worker(self._load(), exclusive=True, group="load")

    def grown(self) -> None:
        self.run_worker(self._load(), exclusive=True, group="load")

    async def _load(self) -> None:
        superseded = self.session.with_superseded
        groups = await self.ask(lambda table: table.same_prompt(self._prompt_hash, with_superseded=superseded))
        if groups is None or len(groups) == self.table.total:
            return
        rewards = [value for group in groups for value in (group.reward_min, group.reward_max) if value is not None]

        async def load(offset: int, limit: int) -> Sequence[GroupSummary]:
            return groups[offset : offset + limit]

        seqs = [group.seq for group in groups]
        cursor = self.table.cursor if self.table.total else seqs.index(self._seq) if self._seq in seqs else 0
        columns = history_columns(min([0.0, *rewards]), max(rewards, default=0.0))
        self.table.open(columns, load, len(groups), cursor=cursor)
        self.query_one("#head", Static).update(_head(groups))

    def on_paged_table_chosen(self, event: PagedTable.Chosen) -> None:
        row = self.table.peek(event.position)
        if row is not None:
            self.inspector.open_group(row.seq, self.walk_groups)

    async def walk_groups(self, by: int) -> int | None:
        """Move the cursor; the seq of the group that is there, None where the table ends."""
        row = await self.table.row(self.table.cursor + by)
        if row is not None:
            self.table.move_to(self.table.cursor + by)
        return None if row is None else row.seq

    def subject(self) -> tuple[str, list[str]] | None:
        row = self.table.peek(self.table.cursor)
        return None if row is None else (str(row.group_id), ["--group", str(row.group_id)])


def _head(groups: Sequence[GroupSummary]) -> Text:
    text = Text.assemble((f"this prompt in {count(len(groups), 'group')}", "bold"))
    scored = [group.reward_mean for group in groups if group.reward_mean is not None]
    if len(scored) > 1:
        text.append(f"  mean reward {number(scored[0])} -> {number(scored[-1])} ({signed(scored[-1] - scored[0])})")
    elif len(groups) == 1:
        text.append("  no other step has seen it (a prompt comes again in the next epoch)", style="dim")
    if groups:
        text.append(f"\n{one_line(groups[0].prompt_preview, 300)}")
    return text
