"""The inspector: opens the screens over a session, and looks for new rows of the run. Screens open others through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from grpo_async.errors import GrpoAsyncError
from grpo_async.store.query import Query
from grpo_async.viewer.terminal.bars import BarsScreen
from grpo_async.viewer.terminal.base import InspectorScreen, Session, WalkGroups, WalkRollouts
from grpo_async.viewer.terminal.browse import BrowseScreen, HistoryScreen
from grpo_async.viewer.terminal.group import GroupScreen
from grpo_async.viewer.terminal.help import HelpScreen
from grpo_async.viewer.terminal.rollout import RolloutScreen
from grpo_async.viewer.token_colours import ColourMode

_LOOK_EVERY_S = 2.0  # for new rows


class Inspector(App[None]):
    """`text` is the filter it begins with, `sort` the order ("" = newest first)."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "inspect-rollouts"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "out", priority=True),
        Binding("L", "light", "light or dark"),
    ]

    def __init__(
        self, session: Session, *, text: str = "", sort: str = "", look_every_s: float = _LOOK_EVERY_S
    ) -> None:
        super().__init__()
        self.session = session
        self.colour_mode = ColourMode.ADVANTAGE  # kept from rollout to rollout
        self._text, self._sort, self._look_every_s = text, sort, look_every_s
        self._complained = ""

    def on_mount(self) -> None:
        self.push_screen(BrowseScreen(self._text, self._sort))
        self.set_interval(self._look_every_s, self.look)

    def look(self) -> None:
        """Ingest what the run has written since, unless that is going on already."""
        self.run_worker(self._look(), exclusive=False, group="look")

    async def _look(self) -> None:
        try:
            has_grown = await self.session.ask(lambda table: table.refresh())
        except GrpoAsyncError as error:
            if str(error) != self._complained:  # once, not every two seconds
                self._complained = str(error)
                self.notify(str(error), severity="error", markup=False, timeout=10)
            return
        for screen in self.screen_stack:
            if isinstance(screen, InspectorScreen):
                screen.looked()
                if has_grown:
                    screen.grown()

    def open_group(self, seq: int, walk: WalkGroups) -> None:
        self.push_screen(GroupScreen(seq, walk))

    def open_rollout(self, seq: int, rollout_id: str, walk: WalkRollouts) -> None:
        self.push_screen(RolloutScreen(seq, rollout_id, walk))

    def open_history(self, prompt_hash: str, seq: int) -> None:
        self.push_screen(HistoryScreen(prompt_hash, seq))

    def open_bars(self, text: str, query: Query) -> None:
        self.push_screen(BarsScreen(text, query))

    def open_help(self, title: str, keys: Sequence[tuple[str, str]]) -> None:
        self.push_screen(HelpScreen(title, keys))

    def action_light(self) -> None:
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"


def run_inspector(session: Session, *, text: str = "", sort: str = "") -> None:
    """Show the inspector until it is left."""
    Inspector(session, text=text, sort=sort).run()
