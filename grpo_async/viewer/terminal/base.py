"""What all screens share: the run, questions to the store, paging, keys, and the help page that is made of them."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from grpo_async.errors import GrpoAsyncError
from grpo_async.run_directory import RunDir
from grpo_async.store import GroupRow
from grpo_async.store.query_names import HELP
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.runs import EvaluationDir
from grpo_async.viewer.token_colors import ColorMode
from grpo_async.viewer.token_text import TokenTexts

Answer = TypeVar("Answer")
Walk = Callable[[int], Awaitable[tuple[int, str] | None]]
"""Moves the cursor of a table by some rows: seq of the group that is there and id of the rollout ("" in a table of groups); None
where the table ends."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One run, opened. `name` is how the user called it; `texts` the token texts, or the sentence that says why there are none;
    `color_mode` is kept from rollout to rollout."""

    run: RunDir
    name: str
    table: RolloutTable
    texts: TokenTexts | str
    with_superseded: bool = False
    color_mode: ColorMode = ColorMode.LOG_RATIO

    async def ask(self, question: Callable[[RolloutTable], Answer]) -> Answer:
        """What the store answers; the question runs in a thread.

        Raises:
            QueryError: the query or the sort order is wrong.
            RunError: the store cannot be read, or has no such row.
        """
        return await asyncio.to_thread(question, self.table)

    @property
    def title(self) -> str:
        """'quickstart', 'quickstart, evaluation of step 40'."""
        return f"{self.name}, evaluation of step {self.run.step}" if isinstance(self.run, EvaluationDir) else self.name

    def command(self, *arguments: str) -> str:
        """The command line that shows something of this run again."""
        evaluation = ["--evaluation", str(self.run.step)] if isinstance(self.run, EvaluationDir) else []
        superseded = ["--superseded"] if self.with_superseded else []
        return shlex.join(["grpo-async", "inspect-rollouts", self.name, *arguments, *evaluation, *superseded])


def key(keys: str, action: str, what: str, short: str = "") -> Binding:
    """A key (several with commas) that the help page explains by `what`; with `short` the bottom line shows it too."""
    return Binding(keys, action, short or what, show=bool(short), tooltip=what)


class Pager(VerticalScroll, inherit_bindings=False):
    """Scrolls what is in it by the keys of pagers."""

    DEFAULT_CSS = "Pager { scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "scroll_up", "scroll up"),
        key("down,j", "scroll_down", "scroll down"),
        key("pageup,ctrl+u", "page_up", "a page up"),
        key("pagedown,ctrl+d,space", "page_down", "a page down"),
        key("home,g", "scroll_home", "to the top"),
        key("end,G", "scroll_end", "to the end"),
    ]


class InspectorScreen(Screen[None], inherit_bindings=False):
    """A screen of the inspector; the app has the keys that all of them share."""

    AUTO_FOCUS = "*"
    TITLE_OF_HELP: ClassVar[str] = ""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    async def ask(self, question: Callable[[RolloutTable], Answer]) -> Answer | None:
        """What the store answers; None after an error, which is shown."""
        try:
            return await self.session.ask(question)
        except GrpoAsyncError as error:
            self.notify(str(error), severity="error", markup=False, timeout=10)
            return None

    def subject(self) -> tuple[str, list[str]] | None:
        """What `y` and `Y` copy: an id, and the options of the command line that shows it; None: there is nothing."""
        return None

    def prompt(self) -> tuple[str, int] | None:
        """Hash of the prompt whose other steps `o` shows, and the seq of its group here; None: there is none."""
        return None


class RowScreen(InspectorScreen):
    """A screen about one row of a table, by the seq of its group, since ids may come twice. `walk` leads to its neighbors."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("n", "go(1)", "the next one of the table", "next"),
        key("p", "go(-1)", "the previous one of the table"),
    ]

    def __init__(self, session: Session, seq: int, rollout_id: str, walk: Walk) -> None:
        super().__init__(session)
        self.seq, self.rollout_id = seq, rollout_id
        self.group: GroupRow | None = None
        self._walk = walk

    def on_mount(self) -> None:
        self.run_worker(self.load(), exclusive=True, group="load")

    async def load(self) -> None:
        """Read the group of the row and show it."""
        found = await self.ask(lambda table: table.group_at(self.seq))
        if found is not None:
            self.group = found
            self.show_row(found)

    def show_row(self, group: GroupRow) -> None:
        """Another row is there to be shown."""

    def prompt(self) -> tuple[str, int] | None:
        return None if self.group is None else (self.group.prompt_hash, self.seq)

    def action_go(self, by: int) -> None:
        self.run_worker(self._go(by), exclusive=True, group="load")

    async def _go(self, by: int) -> None:
        following = await self._walk(by)
        if following is None:
            self.notify("that was the last one" if by > 0 else "that was the first one")
            return
        self.seq, self.rollout_id = following
        await self.load()


class HelpScreen(ModalScreen[None], inherit_bindings=False):
    """The keys of the screen that was open, and what queries may say."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen Pager { width: 96%; max-width: 130; height: 94%; border: round $primary; padding: 0 1; }
    HelpScreen Static { width: 100%; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "back")]

    def __init__(self, title: str, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        parts: list[Text | Table] = [Text(title, style="bold underline"), _table(keys), Text()]
        parts.append(Text("What a filter may say", style="bold underline"))
        for section in HELP:
            rows = [
                (row.syntax, f"{row.meaning}   {row.example}" if row.example != row.syntax else row.meaning)
                for row in section.rows
            ]
            parts += [Text(), Text(section.title, style="bold"), _table(rows)]
        self._content = Group(*parts)

    def compose(self) -> ComposeResult:
        with Pager():
            yield Static(self._content, markup=False)


def _table(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), expand=True)
    widest = max((len(left) for left, _ in rows), default=0)
    table.add_column(style="bold cyan", width=min(widest, 32), overflow="fold")
    table.add_column(ratio=1)
    for left, right in rows:
        table.add_row(Text(left), Text(right))
    return table
