"""Keys of the screen that was open, keys of all screens, and what queries may say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from grpo_async.store.query_names import HELP

_EVERYWHERE = (
    ("esc q", "back; from the first screen: out"),
    ("?", "this page"),
    ("ctrl+c ctrl+q", "out"),
    ("L", "light or dark"),
)


class HelpScreen(ModalScreen[None]):
    """Closed by esc, q or ?."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen VerticalScroll { width: 96%; max-width: 130; height: 94%; border: round $primary; padding: 0 1; }
    HelpScreen Static { width: 100%; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,question_mark,enter", "dismiss", "back"),
        ("down,j", "scroll(1)", "down"),
        ("up,k", "scroll(-1)", "up"),
        ("pagedown,space,ctrl+d", "scroll(15)", "page down"),
        ("pageup,ctrl+u", "scroll(-15)", "page up"),
        ("home,g", "scroll(-100000)", "top"),
        ("end,G", "scroll(100000)", "end"),
    ]

    def __init__(self, title: str, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._keys = title, keys

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._content(), markup=False)

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)

    def _content(self) -> Group:
        parts: list[Text | Table] = [Text(self._title, style="bold underline"), _table(self._keys), Text()]
        parts += [Text("Everywhere", style="bold underline"), _table(_EVERYWHERE), Text()]
        parts.append(Text("What a filter may say", style="bold underline"))
        for section in HELP:
            rows = [
                (row.syntax, f"{row.meaning}   {row.example}" if row.example != row.syntax else row.meaning)
                for row in section.rows
            ]
            parts += [Text(), Text(section.title, style="bold"), _table(rows)]
        return Group(*parts)


def _table(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), expand=True)
    widest = max((len(left) for left, _ in rows), default=0)
    table.add_column(style="bold cyan", width=min(widest, 32), overflow="fold")
    table.add_column(ratio=1)
    for left, right in rows:
        table.add_row(Text(left), Text(right))
    return table
