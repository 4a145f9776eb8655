"""DuckDB as the store uses it: databases in memory that load no extensions, SQL literals, and time limits.

with time_limit(30.0):
    table.page(query)       # TimeoutError after 30 s: a thread that waits for DuckDB cannot be killed, DuckDB can be interrupted
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_INTERRUPT_INTERVAL_S = 0.1
_deadline: ContextVar[float | None] = ContextVar("_deadline", default=None)


def connect(**settings: str) -> DuckDBPyConnection:
    """Open a new database in memory. `settings` are further settings of DuckDB."""
    import duckdb

    extensions = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    return duckdb.connect(":memory:", config={**extensions, **settings})


def quote(text: str) -> str:
    """`text` as an SQL literal: "it's" -> "'it''s'"."""
    return "'" + text.replace("'", "''") + "'"


def sql_path(path: Path) -> str:
    """Escape a path for DuckDB's read functions, which take brackets, stars and question marks for a pattern: the run `a[1]` must
    not be read from `a1`."""
    return re.sub(r"[\[*?]", r"[\g<0>]", str(path))


def sql_paths(paths: Sequence[Path]) -> str:
    """Escaped paths as an SQL list."""
    return f"[{', '.join(quote(sql_path(path)) for path in paths)}]"


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Give all queries in this context (this thread, and tasks that copy its context variables) one common deadline."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


@contextlib.contextmanager
def interrupting(connection: DuckDBPyConnection) -> Iterator[None]:
    """Interrupt the connection at the deadline, if there is one.

    Raises:
        TimeoutError: the deadline has passed.
    """
    import duckdb

    deadline = _deadline.get()
    if deadline is None:
        yield
        return
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("the query timed out")
    is_over = threading.Event()

    def watch() -> None:
        is_done = is_over.wait(left)
        while not is_done:  # again and again: one that meets no running statement is lost
            connection.interrupt()
            is_done = is_over.wait(_INTERRUPT_INTERVAL_S)

    watcher = threading.Thread(target=watch, name="deadline of a query", daemon=True)
    watcher.start()
    try:
        yield
    except duckdb.InterruptException as error:
        raise TimeoutError("the query timed out") from error
    finally:
        is_over.set()
        watcher.join(timeout=10.0)  # an interruption under way must not meet a closed connection
