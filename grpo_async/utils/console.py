"""Where commands print to."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def stdout_console(file: TextIO | None = None, *, width_of_a_pipe: int = 500) -> Console:
    """stdout, or `file`. In a pipe lines stay whole, so that they can be searched; rich would break them after 80 characters."""
    from rich.console import Console

    console = Console(highlight=False, file=file)
    return console if console.is_terminal else Console(highlight=False, file=file, width=width_of_a_pipe)
