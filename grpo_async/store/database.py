"""DuckDB as the store uses it: databases in memory that load no extensions, the lock on what they
reach, SQL literals, and time limits.

with time_limit(30.0):
    table.page(query)       # TimeoutError after 30 s: a thread that waits for DuckDB cannot be killed, DuckDB can be interrupted
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.utils.processes import usable_cpus

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_INTERRUPT_INTERVAL_S = 0.1
_MIN_MEMORY = 256 * 1024 * 1024
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


def lock(connection: DuckDBPyConnection, folders: Sequence[Path], scratch: Path) -> None:
    """Lock a database: it reaches files in `folders` and no others, takes a half of the machine's
    memory at most, and no statement can change that."""
    memory = half_of_memory()
    paths = [each.absolute() for each in folders]
    # A pattern is checked as it stands, and then the files that it names.
    named = [f"{name}/" for path in paths for name in dict.fromkeys((str(path), sql_path(path)))]
    for setting in (
        f"threads = {usable_cpus()}",
        f"memory_limit = '{memory // 1024}KiB'",
        f"temp_directory = {quote(str(scratch))}",
        "parquet_metadata_cache = true",  # sealed blocks never change
        f"allowed_directories = [{', '.join(map(quote, named))}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET GLOBAL {setting}")


def half_of_memory() -> int:
    """A half of the machine's memory, in bytes."""
    return max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, _MIN_MEMORY)


_limiting = threading.Lock()
_num_limited = 0
_limit_before = 0


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Within, in any thread, this process has a half of the machine's memory: `memory_limit` does not count the
    values that a query computes (`len(range(3000000000))`); such a query fails, alone."""
    global _num_limited, _limit_before
    with _limiting:
        if _num_limited == 0:
            _limit_before, most = resource.getrlimit(resource.RLIMIT_DATA)
            limits = [each for each in (_limit_before, most) if each != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min([half_of_memory(), *limits]), most))
        _num_limited += 1
    try:
        yield
    finally:
        with _limiting:
            _num_limited -= 1
            if _num_limited == 0:
                resource.setrlimit(resource.RLIMIT_DATA, (_limit_before, resource.getrlimit(resource.RLIMIT_DATA)[1]))


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
def guarded(connection: DuckDBPyConnection) -> Iterator[None]:
    """Within, queries of users may run: memory is limited, and the deadline interrupts the connection, if there is one.

    Raises:
        TimeoutError: the deadline has passed.
    """
    with _limited_memory(), _interrupting(connection):
        yield


@contextlib.contextmanager
def _interrupting(connection: DuckDBPyConnection) -> Iterator[None]:
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
