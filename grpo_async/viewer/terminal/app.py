"""The inspector: the screens over a session, the keys that all of them share, and the polling for new rows of the run."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from grpo_async.errors import GrpoAsyncError
from grpo_async.store.database import quote
from grpo_async.viewer.terminal.base import HelpScreen, InspectorScreen, Session, key
from grpo_async.viewer.terminal.browse import BrowseScreen

_POLL_EVERY_S = 2.0  # for new rows


class Inspector(App[None]):
    """`text` is the filter that it starts with, `sort` the order ("" = newest first)."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "inspect-rollouts"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("o", "other_steps", "the prompt at other steps", "steps"),
        key("y", "copy_id", "copy the id"),
        key("Y", "copy_command", "copy the command line that shows it again"),
        key("L", "light", "light or dark"),
        key("question_mark", "help", "this page", "help"),
        key("q,escape", "leave", "back; from the first screen: out", "back"),
        Binding("ctrl+c", "quit", "out", show=False, priority=True),
    ]

    def __init__(
        self, session: Session, *, text: str = "", sort: str = "", poll_every_s: float = _POLL_EVERY_S
    ) -> None:
        super().__init__()
        self.session = session
        self.animation_level = "none"
        self._text, self._sort, self._poll_every_s = text, sort, poll_every_s
        self._last_error = ""

    def on_mount(self) -> None:
        self.push_screen(BrowseScreen(self.session, self._text, self._sort))
        self.set_interval(self._poll_every_s, self.poll)

    def poll(self) -> None:
        """Ingest what the run has written since, unless that is going on already."""
        self.run_worker(self._poll(), exclusive=False, group="poll")

    async def _poll(self) -> None:
        try:
            has_grown = await self.session.ask(lambda table: table.refresh())
        except GrpoAsyncError as error:
            if str(error) != self._last_error:  # once, not every two seconds
                self._last_error = str(error)
                self.notify(str(error), severity="error", markup=False, timeout=10)
            return
        for screen in self.screen_stack:
            if isinstance(screen, BrowseScreen):
                screen.refreshed(has_grown)

    def action_leave(self) -> None:
        if len(self.screen_stack) > 2:
            self.pop_screen()
        else:
            self.exit()

    def action_help(self) -> None:
        keys: dict[str, list[str]] = {}
        for active in self.screen.active_bindings.values():
            if active.binding.description:
                what = active.binding.tooltip or active.binding.description
                keys.setdefault(what, []).append(self.get_key_display(active.binding))
        title = self.screen.TITLE_OF_HELP if isinstance(self.screen, InspectorScreen) else ""
        self.push_screen(HelpScreen(title, [(" ".join(pressed), what) for what, pressed in keys.items()]))

    def action_other_steps(self) -> None:
        prompt = self.screen.prompt() if isinstance(self.screen, InspectorScreen) else None
        if prompt is not None:
            prompt_hash, seq = prompt
            self.push_screen(BrowseScreen(self.session, f"prompt_hash = {quote(prompt_hash)}", "seq", seq=seq))

    def action_copy_id(self) -> None:
        if (subject := self._subject()) is not None:
            self._copy(subject[0])

    def action_copy_command(self) -> None:
        if (subject := self._subject()) is not None:
            self._copy(self.session.command(*subject[1]))

    def _subject(self) -> tuple[str, list[str]] | None:
        return self.screen.subject() if isinstance(self.screen, InspectorScreen) else None

    def _copy(self, text: str) -> None:
        """Put `text` into the clipboard, and show it for terminals that do not allow that."""
        self.copy_to_clipboard(text)
        self.notify(text, title="copied", markup=False)

    def action_light(self) -> None:
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"


def run_inspector(session: Session, *, text: str = "", sort: str = "") -> None:
    """Show the inspector until it is left."""
    Inspector(session, text=text, sort=sort).run()
