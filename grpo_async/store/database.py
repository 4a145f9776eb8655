"""DuckDB as the store uses it: databases in memory that load no extensions, the lock on what they
reach, SQL literals, and time limits.

with time_limit(30.0):
    table.page(query)       # TimeoutError after 30 s: DuckDB is interrupted
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.utils.processes import usable_cpus

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_INTERRUPT_S = 0.1  # again and again: an interruption before the query begins is lost

_deadline: ContextVar[float | None] = ContextVar("_deadline", default=None)


def connect() -> DuckDBPyConnection:
    """Open a new database in memory."""
    import duckdb

    settings: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "allow_persistent_secrets": "false",  # those of the user's other databases
        "python_enable_replacements": "false",  # a name is a table, never a variable of this process
    }
    return duckdb.connect(":memory:", config=settings)


def lock(connection: DuckDBPyConnection, *folders: Path) -> None:
    """Lock a database: it reaches files in `folders` and no others, takes a half of the machine's
    memory at most, and no statement can change that."""
    half_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    paths = [each.absolute() for each in folders]
    # A pattern is checked as it stands, and then the files that it names.
    named = [f"{name}/" for path in paths for name in dict.fromkeys((str(path), sql_path(path)))]
    for setting in (
        f"threads = {usable_cpus()}",
        f"memory_limit = '{half_of_memory // 1024}KiB'",
        "temp_directory = ''",
        "parquet_metadata_cache = true",  # sealed blocks never change
        f"allowed_directories = [{', '.join(map(quote, named))}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET GLOBAL {setting}")


def quote(text: str) -> str:
    """`text` as an SQL literal: "it's" -> "'it''s'"."""
    return "'" + text.replace("'", "''") + "'"


def sql_path(path: Path) -> str:
    """Escape a path for DuckDB's read functions, which take brackets, stars and question marks for
    a pattern: the run `a[1]` must not be read from `a1`."""
    return re.sub(r"[\[*?]", r"[\g<0>]", str(path))


def sql_paths(paths: Sequence[Path]) -> str:
    """Escaped paths as an SQL list."""
    return f"[{', '.join(quote(sql_path(path)) for path in paths)}]"


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Give all queries in this context (this thread, and tasks that copy its context variables) one
    common deadline."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


@contextlib.contextmanager
def interrupted_in_time(connection: DuckDBPyConnection) -> Iterator[None]:
    """Interrupt what the connection runs within, at the deadline if there is one.

    Raises:
        TimeoutError: the deadline has passed.
    """
    import duckdb

    deadline = _deadline.get()
    if deadline is None:
        yield
        return
    ended = threading.Event()

    def interrupt() -> None:
        wait_s = max(0.0, deadline - time.monotonic())
        while not ended.wait(wait_s):
            connection.interrupt()
            wait_s = _INTERRUPT_S

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield
    except duckdb.InterruptException as error:
        raise TimeoutError("the query timed out") from error
    finally:
        ended.set()
        thread.join(timeout=10.0)  # an interruption under way must not meet a closed connection
