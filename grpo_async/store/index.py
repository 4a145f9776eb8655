"""The store in memory, without texts and tokens: what filters, sorts and counts are made of.

    blocks --refresh--> `tables`: rows, groups, unsealed
    a query that names texts --condition--> match_N, the rollouts that it holds for

A `refresh` reads new blocks, and of a block that grew the new lines. Rows are never changed but for `superseded`, so nothing is
read or searched twice. A block that is sealed between the listing and
the reading is found under its other name by listing again.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from grpo_async.errors import RunError
from grpo_async.store.blocks import Block, find_blocks, has_writer, open_name, read_branches, sql_path
from grpo_async.store.query import Query, QueryError
from grpo_async.store.query_names import BLOCK_SQL
from grpo_async.store.rows import from_json
from grpo_async.store.schema import COLUMN_NAMES
from grpo_async.store.tables import ROW_KEY, Tables, VersionError, check_version, reading
from grpo_async.store.time_limit import interrupting

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LISTINGS = 5  # a block changes its name once, and blocks are sealed seconds apart
_CHUNK_BYTES = 32 * 1024 * 1024  # of lines that are read at once
_MOST_SEARCHES = 32  # that are remembered
_CHANGING = re.compile(r"last_step|superseded", re.I)  # what holds for rows that are there already


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What is known of a block. `offset`: bytes of the lines that were ingested; `last_seq` -1: no row yet."""

    first: int
    path: Path
    is_sealed: bool
    offset: int = 0
    num_lines: int = 0
    last_seq: int = -1


@dataclass(slots=True, kw_only=True)
class _Search:
    """`table` holds what was found; what was written up to `until_seq` was searched."""

    table: str
    until_seq: int = -1


@dataclass(frozen=True, slots=True)
class Sql:
    """A piece of SQL and the values of its question marks, in order."""

    text: str
    parameters: tuple[object, ...] = ()

    def __add__(self, other: Sql | str) -> Sql:
        if isinstance(other, str):
            return Sql(self.text + other, self.parameters)
        return Sql(self.text + other.text, self.parameters + other.parameters)


class Index:
    """Of one folder. Methods may be called from several threads; those that change something wait for each other.

    Args:
        folder: of the blocks; need not exist yet.
        threads: None: one per core. memory_bytes: None: half of the machine's.
        writable: folders that a statement may write files to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int | None = None,
        memory_bytes: int | None = None,
        writable: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._search_lock = threading.Lock()  # taken before the other
        self._moves = 0  # of rows from the lines to a file
        self._blocks: dict[int, _Block] = {}
        self._problems: dict[str, str] = {}  # damaged blocks and lines
        self._failed: dict[Path, tuple[int, int]] = {}  # damaged file -> (size, mtime): tried again when it changed
        self._num_late = 0  # refreshes that found a block before others that were known: what was searched lacks it
        self._searches: dict[tuple[str, int], _Search] = {}  # by the SQL and what else it depends on
        self._num_searches = 0
        self.generation = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="grpo-async-rollouts-"))
        try:
            self._tables = Tables(folder, self._scratch, writable=writable, threads=threads, memory_bytes=memory_bytes)
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise

    def close(self) -> None:
        """Allowed more than once."""
        with self._lock:
            self._tables.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- reading

    def fetch(self, sql: Sql) -> list[tuple[Any, ...]]:
        """The rows of a SELECT over the tables of the index."""
        with self._cursor() as cursor:
            return cursor.execute(sql.text, sql.parameters).fetchall()

    def stream(self, sql: Sql, rows_at_once: int, query: Query) -> Iterator[tuple[Any, ...]]:
        """As `fetch`, a few rows at a time. `query` is in the SQL."""
        with self._cursor() as cursor, reading(self.folder), of_query(query):
            cursor.execute(sql.text, sql.parameters)
            while rows := cursor.fetchmany(rows_at_once):
                yield from rows

    def blocks_of(self, seqs: Sequence[int]) -> list[Path]:
        """The sealed blocks that hold rows of these groups; others are in `unsealed`."""
        with self._lock:
            sealed = sorted(
                (block for block in self._blocks.values() if block.is_sealed), key=lambda block: block.first
            )
            firsts = [block.first for block in sealed]
            places = {bisect_right(firsts, seq) - 1 for seq in seqs}
            return [sealed[place].path for place in sorted(places) if place >= 0]

    def sealed_blocks(self, after_seq: int = -1) -> list[Path]:
        """Sealed blocks with rows behind `after_seq`, oldest first."""
        with self._lock:
            blocks = [block for _, block in sorted(self._blocks.items())]
            return [block.path for block in blocks if block.is_sealed and block.last_seq > after_seq]

    def parts(self) -> list[Sql]:
        """The whole store in the order of writing, as relations with all columns, each small enough for the memory."""
        names = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
        with self._lock:
            return [
                Sql(f"(SELECT {names} FROM read_parquet(?))", ([sql_path(block.path)],))
                if block.is_sealed
                else Sql(f"(SELECT {names} FROM unsealed WHERE seq BETWEEN ? AND ?)", (block.first, block.last_seq))
                for _, block in sorted(self._blocks.items())
            ]

    def superseded(self) -> str:
        """A condition over `seq`."""
        with self._lock:
            return self._tables.superseded

    def read_blocks(self, columns: str, condition: Sql, files: Sequence[Path]) -> list[tuple[Any, ...]]:
        """SELECT `columns` of the rows in `files` and in `unsealed` for which `condition` holds, in the order of writing.

        Raises:
            RunError: a block is damaged, or was deleted meanwhile.
        """
        source = self.source(files)
        sql = Sql(f"SELECT {columns} FROM ") + source + " WHERE " + condition + " ORDER BY seq, rollout_index"
        with self._cursor() as cursor, reading(self.folder):
            return cursor.execute(sql.text, sql.parameters).fetchall()

    def source(self, files: Sequence[Path]) -> Sql:
        """A relation with all columns: the rows of `files`, and those that are still JSON lines."""
        names = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
        unsealed = f"SELECT {names} FROM unsealed"
        if not files:
            return Sql(f"({unsealed})")
        return Sql(f"(SELECT {names} FROM read_parquet(?) UNION ALL {unsealed})", ([sql_path(path) for path in files],))

    def condition(self, query: Query) -> Sql:
        """What a query says, over the view `rollouts`. One that names texts is searched for in the blocks now, where they were not
        searched before; other questions and `refresh` go on meanwhile.

        Raises:
            QueryError: a value of the store does not allow it.
        """
        if query.parts and query.reads_blocks:
            first, second = (self.condition(part) for part in query.parts)
            return Sql("(") + first + " AND " + second + ")"
        if not query.reads_blocks:
            return Sql(f"({query.sql}\n)")
        changes = _CHANGING.search(query.sql) is not None
        key = (query.sql, self.generation if changes else -1 - self._num_late)
        with self._search_lock:
            search = self._searches.pop(key, None) or self._new_search()
            self._searches[key] = search  # the one used last stands last
            while not self._search(search, query):
                pass  # a block moved meanwhile, which each does once
            while len(self._searches) > _MOST_SEARCHES:
                with self._lock:
                    self._tables.execute(f"DROP TABLE {self._searches.pop(next(iter(self._searches))).table}")
            return Sql(f"row_key IN (SELECT row_key FROM {search.table})")

    def _new_search(self) -> _Search:
        self._num_searches += 1
        search = _Search(table=f"match_{self._num_searches}")
        with self._lock:
            self._tables.execute(f"CREATE TABLE {search.table} (row_key BIGINT)")
        return search

    def _search(self, search: _Search, query: Query) -> bool:
        """Search what is new; False where a block moved from the lines to a file meanwhile: its rows may have been missed."""
        with self._lock:
            until, moves = self._last_seq(), self._moves
            files = self.sealed_blocks(after_seq=search.until_seq)
        if search.until_seq >= until:
            return True
        texts = Sql(f"(SELECT {ROW_KEY} AS row_key, {BLOCK_SQL} FROM ") + self.source(files)
        texts += Sql(" WHERE seq > ? AND seq <= ?)", (search.until_seq, until))
        found = Sql(f"INSERT INTO {search.table} SELECT row_key FROM rollouts JOIN ") + texts
        found += f" USING (row_key) WHERE ({query.sql}\n)"
        with self._cursor() as cursor, reading(self.folder), of_query(query):
            cursor.execute(found.text, found.parameters)
        with self._lock:
            if moves == self._moves:
                search.until_seq = until
            return moves == self._moves

    def _last_seq(self) -> int:
        return max((block.last_seq for block in self._blocks.values()), default=-1)

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[DuckDBPyConnection]:
        """Of its own: those of several threads do not wait for each other. Ends at the deadline of `time_limit`."""
        with self._lock:
            cursor = self._tables.cursor()
        try:
            with interrupting(cursor):
                yield cursor
        finally:
            cursor.close()

    # ------------------------------------------------------------------------------------------------ refreshing

    def refresh(self) -> bool:
        """Ingest what was written since the last time; whether rows came, went or were superseded.

        Raises:
            RunError: the folder cannot be read, or was written by a version with another format.
        """
        with self._lock:
            before, known, last = self.generation, set(self._blocks), self._last_seq()
            for attempt in range(1, _LISTINGS + 1):
                try:
                    self._ingest(self._list())
                    break
                except FileNotFoundError:
                    if attempt == _LISTINGS:
                        raise RunError(f"the blocks in {self.folder} change faster than they can be read") from None
            if self._tables.supersede(read_branches(self.folder)):
                self.generation += 1
            self._num_late += any(first < last for first in self._blocks.keys() - known)
            return self.generation != before

    def damage(self) -> list[str]:
        """Blocks and lines that cannot be read."""
        with self._lock:
            return list(self._problems.values())

    def torn(self) -> list[str]:
        """Last lines that are not whole, and not being written."""
        with self._lock:
            newest = max(self._blocks, default=-1) if has_writer(self.folder) else -1
            return [
                f"the last line of {block.path.name} is torn (the writer was killed, or the disk was full): "
                f"{rest} bytes are left out, at most one group"
                for block in self._blocks.values()
                if not block.is_sealed and (rest := self._torn_bytes(block, is_written=block.first == newest))
            ]

    def _torn_bytes(self, block: _Block, *, is_written: bool) -> int:
        try:
            size = block.path.stat().st_size
        except FileNotFoundError:
            return 0
        return 0 if is_written else max(size - block.offset, 0)

    def _ingest(self, listing: dict[int, Block]) -> None:
        if self._blocks.keys() - listing.keys():
            listing = self._list()  # one may have been sealed while the folder was listed: now its new name is there
            self._forget(self._blocks.keys() - listing.keys())
        self._add_sealed(
            [
                block.path
                for first, block in listing.items()
                if block.is_sealed and first not in self._blocks and self._is_to_be_tried(block.path)
            ]
        )
        for first, block in listing.items():
            known = self._blocks.get(first)
            if not block.is_sealed:
                self._add_lines(known or _Block(first=first, path=block.path, is_sealed=False))
            elif known is not None and not known.is_sealed and self._is_to_be_tried(block.path):
                self._add_rest_of_sealed(known, block.path)
            elif known is None and (lines := self.folder / open_name(first)).exists():  # of a damaged one
                self._add_lines(_Block(first=first, path=lines, is_sealed=False))

    def _list(self) -> dict[int, Block]:
        return {block.first_seq: block for block in find_blocks(self.folder)}

    def _is_to_be_tried(self, path: Path) -> bool:
        stat = path.stat()
        return self._failed.get(path) != (stat.st_size, stat.st_mtime_ns)

    def _add_sealed(self, paths: Sequence[Path]) -> None:
        """All at once, which is fast; one by one where a file is damaged, to find out which."""
        if not paths:
            return
        try:
            self._tables.stage_sealed(paths)
        except VersionError:
            raise
        except RunError as error:
            if len(paths) > 1:
                for path in paths:
                    self._add_sealed([path])
                return
            self._note_damage(paths[0], error)
            return
        self._tables.commit()
        for path in paths:
            first, last = _bounds(path)
            self._blocks[first] = _Block(first=first, path=path, is_sealed=True, last_seq=last)
            self._problems.pop(path.name, None)
        self.generation += 1

    def _note_damage(self, path: Path, error: RunError) -> None:
        stat = path.stat()
        self._failed[path] = (stat.st_size, stat.st_mtime_ns)
        self._problems[path.name] = (
            f"{path} is damaged, its rollouts are left out ({error}); restore it from a copy, or remove it"
        )

    def _add_rest_of_sealed(self, known: _Block, path: Path) -> None:
        """A block whose lines, or the first of them, were ingested before it was sealed."""
        try:
            self._tables.stage_sealed([path], after_seq=known.last_seq)
        except RunError as error:
            self._note_damage(path, error)
            return
        if self._tables.commit(now_sealed=(known.first, known.last_seq)):
            self.generation += 1
        self._moves += 1
        self._blocks[known.first] = replace(known, path=path, is_sealed=True, last_seq=_bounds(path)[1])
        self._problems.pop(path.name, None)

    def _add_lines(self, block: _Block) -> None:
        while True:
            with block.path.open("rb") as file:
                file.seek(block.offset)
                chunk = file.read(_CHUNK_BYTES)
                while chunk and b"\n" not in chunk and len(more := file.read(_CHUNK_BYTES)):
                    chunk += more
            whole = chunk[: chunk.rfind(b"\n") + 1]
            if not whole:
                self._blocks[block.first] = block
                return
            block = self._add_chunk(block, whole)

    def _add_chunk(self, block: _Block, chunk: bytes) -> _Block:
        """Whole lines that begin at `block.offset`; the block with what is known then."""
        lines = chunk.split(b"\n")[:-1]
        _check_schema(block.path, lines[0])
        try:
            num_groups, last = self._tables.stage_lines(chunk, max(map(len, lines)))
        except RunError:
            num_groups, last = 0, -1
        if num_groups != len(lines):
            last = self._stage_undamaged(block, lines)
        self._tables.commit(with_lines=True)
        self.generation += 1
        grown = replace(
            block,
            offset=block.offset + len(chunk),
            num_lines=block.num_lines + len(lines),
            last_seq=max(block.last_seq, last),
        )
        self._blocks[block.first] = grown
        return grown

    def _stage_undamaged(self, block: _Block, lines: Sequence[bytes]) -> int:
        whole = []
        for number, line in enumerate(lines, start=block.num_lines + 1):
            if (problem := _problem_of(line)) is None:
                whole.append(line + b"\n")
            else:
                self._problems[f"{block.path.stem}:{number}"] = (
                    f"{block.path}:{number}: the line is damaged and left out: {problem}"
                )
        return self._tables.stage_lines(b"".join(whole), max(map(len, whole), default=0))[1]

    def _forget(self, firsts: set[int]) -> None:
        """Blocks that were deleted (the store outgrew `record.rollouts.max_gb`)."""
        for first in firsts:
            self._tables.delete(first, self._blocks[first].last_seq)
            del self._blocks[first]
            self.generation += 1


def _bounds(path: Path) -> tuple[int, int]:
    """First and last seq of a sealed block, by its name."""
    _, first, last = path.stem.split("-")
    return int(first), int(last)


def _check_schema(path: Path, line: bytes) -> None:
    """Raises VersionError. A line that says no version is damaged, which is found out later."""
    try:
        schema = orjson.loads(line).get("schema")
    except (ValueError, AttributeError):
        return
    if isinstance(schema, int):
        check_version(str(path), str(schema))


def _problem_of(line: bytes) -> str | None:
    """What is wrong with a line; None: nothing."""
    try:
        from_json(line)
    except ValueError as error:
        return str(error)
    return None


@contextlib.contextmanager
def of_query(query: Query) -> Iterator[None]:
    """What a value of the store makes of a query that is right in itself (a text that is no number) is an error of the query; what
    is wrong with a file is not."""
    import duckdb

    try:
        yield
    except (duckdb.InterruptException, duckdb.IOException, duckdb.PermissionException):
        raise
    except duckdb.Error as error:
        problem = str(error).split("\n", 1)[0]
        if query.is_everything or re.search("parquet|decompress", problem, re.I):
            raise
        raise QueryError(query.text, 0, len(query.text), problem) from error
