"""The same prompt at every step that saw it: did it get better?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from grpo_async.store.summaries import GroupSummary
from grpo_async.viewer.figures import count, number, signed
from grpo_async.viewer.safe_text import one_line
from grpo_async.viewer.terminal.base import InspectorScreen, Keys
from grpo_async.viewer.terminal.columns import history_columns
from grpo_async.viewer.terminal.paged_table import PagedTable


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
        from grpo_async.viewer.terminal.group import GroupScreen

        row = self.table.peek(event.position)
        if row is not None:
            self.app.push_screen(GroupScreen(row.seq, self.walk_groups))

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
