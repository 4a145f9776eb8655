"""Where commands print to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def stdout_console(file: TextIO | None = None, *, width_of_a_pipe: int = 500) -> Console:
    """A console on stdout, or on `file`. In a pipe lines stay whole, so that they can be searched; rich would break them after 80
    characters."""
    from rich.console import Console

    file = file or sys.stdout
    console = Console(highlight=False, file=file)
    return console if console.is_terminal else Console(highlight=False, file=file, width=width_of_a_pipe)


def print_rows(console: Console, rows: Iterable[tuple[str | Text, ...]]) -> None:
    """Print rows that have equally many cells; the last cell may be of any length. In a pipe each row is one line."""
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    names = list(zip(*rows, strict=True))[:-1]
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in names]
        for *cells, text in rows:
            padded = [f"{cell!s:{width}}" for cell, width in zip(cells, widths, strict=True)]
            line = " ".join(map(str.strip, str(text).splitlines()))
            console.print(Text("  ".join([*padded, line])), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    for number, _ in enumerate(names):
        table.add_column(no_wrap=True, style="" if number else "bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
