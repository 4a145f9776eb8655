"""The filter line: a query is typed, and what is wrong with it stands under it, with carets under the mistake."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, Label, Static

from grpo_async.store.query import QueryError
from grpo_async.viewer.safe_text import one_line

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
