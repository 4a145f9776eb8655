"""The store in memory, without texts and tokens: filters, sorts and counts use it.

    blocks --refresh--> rows, groups, unsealed (query_names)
    a query that names texts --condition--> match_N, the rollouts that match it

A `refresh` reads the blocks that are new or have grown. Each comes into the tables as one change: cursors of other threads see the
state before or after. A block that is sealed between the listing and the reading is found under its other name by listing again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_async.errors import RunError
from grpo_async.store.database import connect, interrupting, quote, sql_path, sql_paths
from grpo_async.store.files import MAX_LISTINGS, Block, Metadata, find_blocks, has_writer, read_metadata, torn_bytes
from grpo_async.store.query import EVERYTHING, Query, QueryError
from grpo_async.store.query_names import BLOCK_SQL, GROUPS_SQL, INDEXED, ROW_KEY, create_tables
from grpo_async.store.schema import COLUMN_NAMES, select_from_lines
from grpo_async.utils.files import file_stamp
from grpo_async.utils.processes import usable_cpus
from grpo_async.utils.text import count, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MAX_SEARCHES = 32  # that are remembered
_MIN_MEMORY = 256 * 1024 * 1024
_ROWS_AT_ONCE = 256
_SMALL = ", ".join(f'"{name}"' for name in INDEXED)
_ALL = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
_MAX_SEQ = (1 << 63) - 1


class Index:
    """The tables of one store. Safe to use from several threads.

    Args:
        writable: further folders that may be written to.

    Attributes:
        generation: grows whenever `refresh` found something new.
    """

    def __init__(self, folder: Path, *, writable: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.generation = 0
        self.metadata = Metadata()
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}  # those that can be read, by their first seq
        self._stamps: dict[int, tuple[Path, int, int] | None] = {}  # of what was read, damaged ones too
        self._damage: dict[int, str] = {}
        self._search_lock = threading.Lock()
        self._searches: dict[tuple[int, str], str] = {}  # (generation, SQL) -> table
        self._numbers = itertools.count()
        self._scratch = Path(tempfile.mkdtemp(prefix="grpo-async-rollouts-"))
        try:
            self._connection = _connect((folder, *writable), self._scratch)
            create_tables(self._connection)
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise

    def close(self) -> None:
        """Allowed more than once."""
        with self._lock:
            self._connection.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- reading

    def fetch(self, sql: str, query: Query = EVERYTHING) -> list[tuple[Any, ...]]:
        """The rows of a SELECT. `query` is the one in it, for errors.

        Raises:
            QueryError: a value of the store does not allow the query (a text that is not a number).
            RunError: a block is damaged, or was sealed or deleted meanwhile.
            TimeoutError: the deadline of `time_limit` has passed.
        """
        with self._cursor(query) as cursor:
            return cursor.execute(sql).fetchall()

    def stream(self, sql: str, query: Query) -> Iterator[tuple[Any, ...]]:
        """As `fetch`, a few rows at a time."""
        with self._cursor(query) as cursor:
            cursor.execute(sql)
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                yield from rows

    def relation(self, seqs: Sequence[int] | None = None) -> str:
        """A relation with all columns and at least the rows of these groups; None: of all."""
        with self._lock:
            sealed = [block for _, block in sorted(self._blocks.items()) if block.is_sealed]
        if seqs is not None:
            firsts = [block.first_seq for block in sealed]
            indexes = {bisect_right(firsts, seq) - 1 for seq in seqs}
            sealed = [sealed[index] for index in sorted(indexes) if index >= 0]
        files = sql_paths([block.path for block in sealed])
        unsealed = f"SELECT {_ALL} FROM unsealed"
        return f"({unsealed} UNION ALL SELECT {_ALL} FROM read_parquet({files}))" if sealed else f"({unsealed})"

    def parts(self) -> list[str]:
        """The whole store in the order of writing, as relations with all columns, each small enough for the memory."""
        with self._lock:
            return [
                f"(SELECT {_ALL} FROM read_parquet({sql_paths([block.path])}))"
                if block.is_sealed
                else f"(SELECT {_ALL} FROM unsealed WHERE {self._range(first)})"
                for first, block in sorted(self._blocks.items())
            ]

    def condition(self, query: Query) -> str:
        """The SQL of a query over the view `rollouts`. One that names texts reads the blocks once; its matches stay in a table.
        Raises the errors of `fetch`."""
        if not query.reads_blocks:
            return query.sql
        with self._search_lock:
            key = (self.generation, query.sql)
            if key not in self._searches:
                table = f"match_{next(self._numbers)}"
                texts = f"(SELECT {ROW_KEY} AS row_key, {BLOCK_SQL} FROM {self.relation()})"
                found = f"SELECT row_key FROM rollouts JOIN {texts} USING (row_key) WHERE {query.sql}"
                self.fetch(f"CREATE TABLE {table} AS {found}", query)
                self._searches[key] = table
                if len(self._searches) > _MAX_SEARCHES:
                    self.fetch(f"DROP TABLE {self._searches.pop(next(iter(self._searches)))}")
            return f"row_key IN (SELECT row_key FROM {self._searches[key]})"

    @contextlib.contextmanager
    def _cursor(self, query: Query) -> Iterator[DuckDBPyConnection]:
        """A cursor for this query alone, so that threads do not wait for each other."""
        import duckdb

        with self._lock:
            cursor = self._connection.cursor()
        try:
            with interrupting(cursor):
                yield cursor
        except duckdb.Error as error:
            problem = first_line(str(error))
            is_of_file = isinstance(error, (duckdb.IOException, duckdb.PermissionException))
            if query.text and not is_of_file and not re.search("parquet|decompress", problem, re.I):
                raise QueryError(query.text, 0, len(query.text), problem) from error
            raise RunError(f"cannot read the rollouts in {self.folder}: {problem}") from error
        finally:
            cursor.close()

    # ------------------------------------------------------------------------------------------------ refreshing

    def refresh(self) -> bool:
        """Read what was written since the last time; whether anything changed.

        Raises:
            RunError: the folder cannot be read, or was written by a version with another format.
        """
        with self._lock:
            generation, before = self.generation, self.metadata.superseded_condition()
            try:
                self.metadata = read_metadata(self.folder)
                if (superseded := self.metadata.superseded_condition()) != before:
                    with self._change():
                        for table in ("rows", "groups"):
                            self._connection.execute(f"UPDATE {table} SET superseded = {superseded}")
                    self.generation += 1
                if not any(self._read_blocks() for _ in range(MAX_LISTINGS)):
                    raise RunError(f"the blocks in {self.folder} change faster than they can be read")
            except OSError as error:
                raise RunError(f"cannot read the rollouts in {self.folder}: {error}") from error
            return self.generation != generation

    def damage(self) -> list[str]:
        """Blocks and lines that cannot be read."""
        with self._lock:
            return list(self._damage.values())

    def torn(self) -> list[str]:
        """Last lines that are not whole, and not being written."""
        with self._lock:
            written = max(self._blocks, default=-1) if has_writer(self.folder) else -1
            found = []
            for first, block in self._blocks.items():
                with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
                    if not block.is_sealed and first != written and (rest := torn_bytes(block.path)):
                        found.append(
                            f"the last line of {block.path.name} is torn (the writer was killed, or the disk was full): "
                            f"{rest} bytes are left out, at most one group"
                        )
            return found

    def _read_blocks(self) -> bool:
        """Read the blocks that are new or have changed; False: one has gone since they were listed."""
        listing = {block.first_seq: block for block in find_blocks(self.folder)}
        for first in self._stamps.keys() - listing.keys():  # deleted: the store outgrew `record.rollouts.max_gb`
            with self._change():
                self._delete(first)
            self._forget(first)
        changed = [block for first, block in listing.items() if self._stamps.get(first) != file_stamp(block.path)]
        sealed = [block for block in changed if block.is_sealed]
        are_read = len(sealed) > 1 and self._read(sealed)  # all at once, which is fast
        for block in changed:
            if not (block.is_sealed and are_read):
                self._read([block])
        stamps = {first: self._stamps.get(first) for first in listing}
        return all(stamp and stamp[0] == listing[first].path for first, stamp in stamps.items())

    def _forget(self, first: int) -> None:
        self._blocks.pop(first, None)
        self._stamps.pop(first, None)
        self._damage.pop(first, None)
        self.generation += 1

    def _read(self, blocks: Sequence[Block]) -> bool:
        """Read these blocks, instead of what was known of them; whether they can be read."""
        import duckdb

        stamps = [file_stamp(block.path) for block in blocks]
        try:
            with self._change():
                for block in blocks:
                    self._delete(block.first_seq)
                num_damaged = self._insert(blocks)
        except (duckdb.Error, OSError) as error:
            first, path = blocks[0].first_seq, blocks[0].path
            if len(blocks) == 1 and path.exists():
                with self._change():
                    self._delete(first)
                self._forget(first)
                self._stamps[first] = stamps[0]
                # a block that the system does not let us read may be whole
                advice = "make it readable" if isinstance(error, OSError) else "restore it from a copy, or remove it"
                self._damage[first] = (
                    f"{path} is damaged, its rollouts are left out ({first_line(str(error))}); {advice}"
                )
            return False
        for block, stamp in zip(blocks, stamps, strict=True):
            self._forget(block.first_seq)
            self._blocks[block.first_seq] = block
            self._stamps[block.first_seq] = stamp
        if num_damaged > 0:
            self._damage[blocks[0].first_seq] = f"{blocks[0].path}: left out {count(num_damaged, 'damaged line')}"
        return True

    def _insert(self, blocks: Sequence[Block]) -> int:
        """The rows of sealed blocks, or of one of lines. Returns the number of damaged lines."""
        run, num_damaged = self._connection.execute, 0
        if blocks[0].is_sealed:
            source = f"read_parquet({sql_paths([block.path for block in blocks])})"
        else:
            path, within = blocks[0].path, self._range(blocks[0].first_seq)
            num_lines = path.read_bytes().count(b"\n")
            run(f"INSERT INTO unsealed {select_from_lines(path)}")
            found = run(f"SELECT count(DISTINCT seq) FROM unsealed WHERE {within}").fetchone()
            assert found is not None
            num_damaged = num_lines - found[0]
            source = f"unsealed WHERE {within}"
        run(f"INSERT INTO rows SELECT {_SMALL}, {self.metadata.superseded_condition()}, {ROW_KEY} FROM {source}")
        run("INSERT INTO groups " + GROUPS_SQL.format("(SELECT * FROM rows WHERE seq NOT IN (SELECT seq FROM groups))"))
        return num_damaged

    def _delete(self, first: int) -> None:
        for table in ("rows", "groups", "unsealed"):
            self._connection.execute(f"DELETE FROM {table} WHERE {self._range(first)}")

    def _range(self, first: int) -> str:
        """A condition for the rows of a block: those before the next one."""
        following = min((other for other in self._blocks if other > first), default=_MAX_SEQ)
        return f"seq >= {first} AND seq < {following}"

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """What is done within becomes visible at once, or not at all."""
        self._connection.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _connect(folders: Sequence[Path], scratch: Path) -> DuckDBPyConnection:
    """A database that reaches files in `folders` and no others, and takes half of the machine's memory at most."""
    memory = max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, _MIN_MEMORY)
    connection = connect(
        threads=str(usable_cpus()),
        memory_limit=f"{memory // 1024}KiB",
        temp_directory=str(scratch),
    )
    connection.execute("SET parquet_metadata_cache = true")  # sealed blocks never change
    paths = [each.absolute() for each in folders]
    # A pattern is checked as it stands, and then the files that it names.
    readable = ", ".join(quote(f"{name}/") for path in paths for name in dict.fromkeys((str(path), sql_path(path))))
    connection.execute(f"SET allowed_directories = [{readable}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection
