"""What all screens share: the run that is looked at, the line of keys, the keys that leave, copying, and questions to the store."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static

from grpo_async.errors import GrpoAsyncError
from grpo_async.rundir import RunDir
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.runs import EvaluationDir
from grpo_async.viewer.token_text import TokenTexts

if TYPE_CHECKING:
    from grpo_async.viewer.terminal.app import Inspector


Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run, opened. `name` is how the user called it; `texts` the token texts, or the sentence that says why there are none."""

    run: RunDir
    name: str
    table: RolloutTable
    texts: TokenTexts | str
    with_superseded: bool = False

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


WalkGroups = Callable[[int], Awaitable[int | None]]
"""Moves the cursor of a table; the seq of the group that is there, None where the table ends."""
WalkRollouts = Callable[[int], Awaitable[tuple[int, str] | None]]
"""The same for rollouts: seq of the group, and id."""


class Keys(Static):
    """One line of keys at the bottom: (key, what it does) pairs, as many as fit."""

    DEFAULT_CSS = "Keys { dock: bottom; height: 1; background: $panel; }"

    def __init__(self, *keys: tuple[str, str]) -> None:
        super().__init__("", markup=False)
        self._keys = keys

    def on_resize(self) -> None:
        text = Text(no_wrap=True)
        for key, what in (*self._keys, ("?", "help"), ("q", "back")):
            piece = Text.assemble((f" {key}", "bold"), f" {what} ")
            if text.cell_len + piece.cell_len <= self.size.width:
                text.append_text(piece)
        self.update(text)


class InspectorScreen(Screen[None]):
    """A screen of the inspector. `explain` is what its help page says first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "back"),
        Binding("question_mark", "help", "help"),
        Binding("y", "copy_id", "copy the id"),
        Binding("Y", "copy_command", "copy the command that shows it again"),
    ]
    AUTO_FOCUS = "*"
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Keys of this screen and what they do, for the help page."""
    TITLE_OF_HELP: ClassVar[str] = ""

    @property
    def inspector(self) -> Inspector:
        return cast("Inspector", self.app)

    @property
    def session(self) -> Session:
        return self.inspector.session

    async def ask(self, question: Callable[[RolloutTable], Answer]) -> Answer | None:
        """What the store answers; None after an error, which is shown."""
        try:
            return await self.session.ask(question)
        except GrpoAsyncError as error:
            self.complain(str(error))
            return None

    def complain(self, text: str) -> None:
        self.notify(text, severity="error", markup=False, timeout=10)

    def copied(self, text: str) -> None:
        """Put `text` into the clipboard, and show it for terminals that do not allow that."""
        self.app.copy_to_clipboard(text)
        self.notify(text, title="copied", markup=False)

    def subject(self) -> tuple[str, list[str]] | None:
        """(id, options of the command line) of what `y` and `Y` copy; None: there is nothing."""
        return None

    def grown(self) -> None:
        """Called when the store has new rows."""

    def looked(self) -> None:
        """Called whenever the store was looked at, new rows or not."""

    def action_leave(self) -> None:
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()
        else:
            self.app.exit()

    def action_help(self) -> None:
        self.inspector.open_help(self.TITLE_OF_HELP, self.KEYS)

    def action_copy_id(self) -> None:
        if (subject := self.subject()) is not None:
            self.copied(subject[0])

    def action_copy_command(self) -> None:
        if (subject := self.subject()) is not None:
            self.copied(self.session.command(*subject[1]))
