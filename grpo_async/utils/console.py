"""Where commands print to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def stdout_console(file: TextIO | None = None, *, width_of_a_pipe: int = 500) -> Console:
    """stdout, or `file`. In a pipe lines stay whole, so that they can be searched; rich would break them after 80 characters."""
    from rich.console import Console

    console = Console(highlight=False, file=file)
    return console if console.is_terminal else Console(highlight=False, file=file, width=width_of_a_pipe)


def print_rows(console: Console, rows: Iterable[tuple[str, Text]]) -> None:
    """Names and texts below each other; in a pipe each is one line, whatever its length."""
    from rich.table import Table
    from rich.text import Text

    rows = [(name, text) for name, text in rows if text]
    if not console.is_terminal:
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            console.print(Text.assemble(f"{name:{width}}  ", text), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
