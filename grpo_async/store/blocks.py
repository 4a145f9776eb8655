"""The files of a store as tables of DuckDB, for reading; `stored` is what they hold now.

    block-N-M.parquet, block-...   read where they are, by every query
    block-N.jsonl (the open one)   read into the table `unsealed` when it has grown

A `refresh` makes `stored` anew if a file came, went or grew: cursors of other threads see it as it
was or as it is. A query that meets a block which was sealed meanwhile is asked again.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from grpo_async.errors import RunError
from grpo_async.store.database import connect, guarded, lock, sql_paths
from grpo_async.store.files import (
    MAX_LISTINGS,
    Block,
    Metadata,
    find_blocks,
    has_writer,
    read_metadata,
    torn_bytes,
)
from grpo_async.store.names import LAST_STEP_SQL, SMALL, VIEW_SQL
from grpo_async.store.query import EVERYTHING, Query, QueryError
from grpo_async.store.schema import COLUMN_NAMES, NO_ROWS_SQL, select_from_lines
from grpo_async.utils.files import file_stamp
from grpo_async.utils.text import count, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Row: TypeAlias = dict[str, Any]

ALL = ", ".join(f'"{name}"' for name in COLUMN_NAMES)


class Blocks:
    """The database of one store. Safe to use from several threads.

    Args:
        writable: further folders that may be written to.

    Attributes:
        damage: blocks and lines that cannot be read, a sentence each.
        generation: grows whenever `refresh` found something new.
        newest_seq: the highest seq of all groups, superseded or not; -1: there is none.
    """

    def __init__(self, folder: Path, writable: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.damage: list[str] = []
        self.generation = 0
        self.newest_seq = -1
        self.metadata = Metadata()
        self._state: object = None  # of the files, as they were read
        self._blocks: list[Block] = []  # those that can be read
        self._sound: set[object] = set()  # stamps of sealed blocks that were looked at
        self._unreadable: dict[object, str] = {}  # stamps of the others, and why
        self._lock = threading.RLock()
        self._scratch = Path(tempfile.mkdtemp(prefix="grpo-async-rollouts-"))
        self._connection = connect()
        lock(self._connection, (folder, *writable), self._scratch)
        self._load(Metadata(), [])
        self._connection.execute(LAST_STEP_SQL)
        self._connection.execute(VIEW_SQL)

    def close(self) -> None:
        """Allowed more than once."""
        with self._lock:
            self._connection.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    # -- reading

    def fetch(self, sql: str | Callable[[], str], query: Query = EVERYTHING) -> list[Row]:
        """The rows of a SELECT; one that names blocks (`of`) is made again where these have changed.
        `query` is the one in it, for errors. Raises the errors of `cursor`."""

        def ask() -> list[Row]:
            with self.cursor(query) as cursor:
                rows = cursor.execute(sql if isinstance(sql, str) else sql()).fetchall()
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in rows]

        try:
            return ask()
        except RunError:
            if not (self.refresh() or self._set_damaged_aside()):
                raise
            return ask()

    @contextlib.contextmanager
    def cursor(self, query: Query = EVERYTHING) -> Iterator[DuckDBPyConnection]:
        """A cursor for this query alone, so that threads do not wait for each other.

        Raises:
            QueryError: the query does not fit what is stored (a text that is not a number).
            RunError: a block is damaged, or was sealed or deleted meanwhile.
            TimeoutError: the deadline of `time_limit` has passed.
        """
        import duckdb

        with self._lock:
            cursor = self._connection.cursor()
        try:
            with guarded(cursor):
                yield cursor
        except duckdb.Error as error:
            problem = first_line(str(error))
            is_of_file = isinstance(error, duckdb.IOException)
            if query.text and not is_of_file and not re.search("parquet|decompress", problem, re.I):
                raise QueryError(query.text, problem) from error
            raise RunError(f"cannot read the rollouts in {self.folder}: {problem}") from error
        finally:
            cursor.close()

    def of(self, seqs: Sequence[int]) -> str:
        """A relation with all columns, and at least the rows of these groups."""
        with self._lock:
            firsts = [block.first_seq for block in self._blocks]
            places = {bisect_right(firsts, seq) - 1 for seq in seqs} - {-1}
            return self._relation([self._blocks[place] for place in sorted(places)])

    def parts(self) -> list[str]:
        """The store in the order of writing, as relations that are each small enough for memory."""
        with self._lock:
            return [self._relation([block]) for block in self._blocks]

    def torn(self) -> Iterator[str]:
        """Last lines that are not whole, and not being written."""
        lines = [block for block in self._blocks if not block.is_sealed]
        for block in lines[:-1] if has_writer(self.folder) else lines:
            with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
                if rest := torn_bytes(block.path):
                    yield (
                        f"the last line of {block.path.name} is torn (the writer was killed, or the "
                        f"disk was full): {rest} bytes are left out, at most one group"
                    )

    def _relation(self, blocks: Sequence[Block]) -> str:
        lines = [f"seq >= {each.first_seq} AND seq < {self._end_of(each)}" for each in blocks if not each.is_sealed]
        sealed = [each.path for each in blocks if each.is_sealed]
        return _union(self.metadata, sealed, " OR ".join(lines) or "false")

    def _end_of(self, block: Block) -> int:
        """The first seq after a block."""
        later = (each.first_seq for each in self._blocks if each.first_seq > block.first_seq)
        return min(later, default=(1 << 63) - 1)

    # -- refreshing

    def refresh(self) -> bool:
        """Read what was written since; whether anything changed.

        Raises:
            RunError: the folder cannot be read, or is of a version with another format.
        """
        import duckdb

        with self._lock:
            try:
                for _ in range(MAX_LISTINGS):
                    metadata, blocks = read_metadata(self.folder), find_blocks(self.folder)
                    state = (metadata.superseded, [file_stamp(block.path) for block in blocks])
                    if state == self._state:
                        self.metadata = metadata
                        return False
                    with contextlib.suppress(FileNotFoundError, duckdb.IOException):
                        self._load(metadata, blocks)
                        self._state = state
                        return True
            except OSError as error:
                raise RunError(f"cannot read the rollouts in {self.folder}: {error}") from error
            raise RunError(f"the blocks in {self.folder} change faster than they can be read")

    def _load(self, metadata: Metadata, blocks: Sequence[Block]) -> None:
        """Make `stored` of these blocks. FileNotFoundError, or DuckDB's IOException: one was sealed
        or deleted meanwhile."""
        self._look_at(blocks, "count(*)")
        num_lines = {each: self._count_lines(each) for each in blocks if not each.is_sealed}
        readable = [each for each in blocks if file_stamp(each.path) not in self._unreadable]
        lines = [each.path for each in readable if not each.is_sealed]
        sealed = [each.path for each in readable if each.is_sealed]
        with self._connection.cursor() as cursor, _transaction(cursor):
            rows = select_from_lines(*lines) if lines else NO_ROWS_SQL
            cursor.execute(f"CREATE OR REPLACE TABLE unsealed AS {rows}")
            cursor.execute(f"CREATE OR REPLACE VIEW stored AS SELECT * FROM {_union(metadata, sealed)}")
            seqs = cursor.execute("SELECT DISTINCT seq FROM unsealed").fetchall()
        self.metadata, self._blocks = metadata, readable
        lasts = [each.last_seq for each in readable if each.last_seq is not None]
        self.newest_seq = max([-1, *lasts, *(seq for (seq,) in seqs)])
        self.generation += 1
        stamps = [file_stamp(each.path) for each in blocks]
        self.damage = [self._unreadable[stamp] for stamp in stamps if stamp in self._unreadable]
        for block, number in num_lines.items():
            found = sum(1 for (seq,) in seqs if block.first_seq <= seq < self._end_of(block))
            if number > found:
                damaged = count(number - found, "damaged line")
                self.damage.append(f"{block.path}: left out {damaged}")

    def _count_lines(self, block: Block) -> int:
        """The number of lines; 0 where they cannot be read."""
        try:
            return block.path.read_bytes().count(b"\n")
        except FileNotFoundError:
            raise
        except OSError as error:
            self._note(block, f"{error}); make it readable")
            return 0

    def _look_at(self, blocks: Sequence[Block], columns: str) -> bool:
        """Try to read sealed blocks that were not looked at yet; whether one is damaged."""
        import duckdb

        known = self._sound | self._unreadable.keys()
        new = [each for each in blocks if each.is_sealed and file_stamp(each.path) not in known]

        def problem(some: Sequence[Block]) -> str:
            files = sql_paths([each.path for each in some])
            try:
                with self._connection.cursor() as cursor:
                    cursor.execute(f"SELECT {columns} FROM read_parquet({files})").fetchall()
                return ""
            except duckdb.Error as error:
                return first_line(str(error))

        damaged = new if new and problem(new) else []  # all at once is fast
        damaged = [each for each in damaged if problem([each]) and each.path.exists()]
        for block in damaged:
            self._note(block, f"{problem([block])}); restore it from a copy, or remove it")
        self._sound |= {file_stamp(each.path) for each in new if each not in damaged}
        return bool(damaged)

    def _note(self, block: Block, why: str) -> None:
        what = f"{block.path} is damaged, its rollouts are left out ({why}"
        self._unreadable[file_stamp(block.path)] = what

    def _set_damaged_aside(self) -> bool:
        """Something could not be read: look for damage within the blocks. Whether there is some
        that was not known."""
        with self._lock:
            self._sound.clear()
            is_damaged = self._look_at(self._blocks, ", ".join(f'count("{name}")' for name in SMALL))
            if is_damaged:
                self._load(self.metadata, find_blocks(self.folder))
            return is_damaged


def _union(metadata: Metadata, sealed: Sequence[Path], lines: str = "true") -> str:
    """A relation of sealed blocks, and of the lines for which a condition holds."""
    files = f" UNION ALL SELECT {ALL} FROM read_parquet({sql_paths(sealed)})" if sealed else ""
    rows = f"SELECT {ALL} FROM unsealed WHERE {lines}{files}"
    return f"(SELECT *, {metadata.superseded_condition()} AS superseded FROM ({rows}))"


@contextlib.contextmanager
def _transaction(cursor: DuckDBPyConnection) -> Iterator[None]:
    """What is done within becomes visible at once, or not at all."""
    cursor.execute("BEGIN")
    try:
        yield
    except BaseException:
        cursor.execute("ROLLBACK")
        raise
    cursor.execute("COMMIT")
