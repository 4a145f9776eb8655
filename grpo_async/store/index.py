"""The store in memory, without texts and tokens: what filters, sorts and counts are made of.

    blocks --refresh--> rows, groups, unsealed (query_names)
    a query that names texts --condition--> match_N, the rollouts that it holds for

A `refresh` reads new blocks, and of a block that grew the new lines; rows are never changed but for `superseded`, so nothing is
read or searched twice. Each block comes into the tables as one change: cursors of other threads see the state before or after. A
block that is sealed between the listing and the reading is found under its other name by listing again.
"""

from __future__ import annotations

import contextlib
import os
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
from grpo_async.store.blocks import Block, find_blocks, has_writer, open_name, read_abandoned, size_of
from grpo_async.store.database import connect, quote, sql_path
from grpo_async.store.query import Query, QueryError
from grpo_async.store.query_names import BLOCK_SQL, GROUPS_SQL, INDEXED, ROW_KEY, create_tables
from grpo_async.store.schema import COLUMN_NAMES, OLD_NAMES, OLD_SCHEMA, SCHEMA, select_from_lines
from grpo_async.store.time_limit import interrupting
from grpo_async.utils.cpus import usable_cpus
from grpo_async.utils.text import first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LISTINGS = 5  # a block changes its name once, and blocks are sealed seconds apart
_CHUNK_BYTES = 32 * 1024 * 1024  # of lines that are read at once
_MAX_SEARCHES = 32  # that are remembered
_MIN_MEMORY = 256 * 1024 * 1024
_CHANGING = re.compile(r"\blast|superseded", re.I)  # what holds for rows that are there already
_VERSIONS = "SELECT file_name, value FROM parquet_kv_metadata(?) WHERE key = 'grpo_async_schema'"
_ALL_COLUMNS = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
_OLD_COLUMNS = ", ".join(f'"{OLD_NAMES.get(name, name)}" AS "{name}"' for name in COLUMN_NAMES)
_NEW = "(SELECT * FROM {} WHERE seq NOT IN (SELECT seq FROM groups))"


class VersionError(RunError):
    """A block is in a format of another version."""


class _DamagedLinesError(RunError):
    """At least one of some lines is not a group."""


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
    """The tables of one store. Safe to use from several threads.

    Args:
        writable: further folders that may be written to.
    """

    def __init__(self, folder: Path, *, writable: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._search_lock = (
            threading.Lock()
        )  # taken before the other; a refresh takes it too: no row moves during a search
        self._blocks: dict[int, _Block] = {}
        self._abandoned: list[tuple[int, int]] = []
        self._problems: dict[str, str] = {}  # damaged blocks and lines
        self._old: set[str] = set()  # names of sealed blocks of OLD_SCHEMA
        self._failed: dict[Path, tuple[int, int]] = {}  # damaged file -> (size, mtime): tried again when it changed
        self._searches: dict[str, _Search] = {}  # by their SQL
        self._num_searches = 0
        self.generation = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="grpo-async-rollouts-"))
        try:
            self._connection = _connect((folder, self._scratch, *writable), self._scratch)
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
            indexes = {bisect_right(firsts, seq) - 1 for seq in seqs}
            return [sealed[index].path for index in sorted(indexes) if index >= 0]

    def sealed_blocks(self, after_seq: int = -1) -> list[Path]:
        """Sealed blocks with rows behind `after_seq`, oldest first."""
        with self._lock:
            blocks = [block for _, block in sorted(self._blocks.items())]
            return [block.path for block in blocks if block.is_sealed and block.last_seq > after_seq]

    def parts(self) -> list[Sql]:
        """The whole store in the order of writing, as relations with all columns, each small enough for the memory."""
        with self._lock:
            return [
                Sql("(") + self._from_files([block.path]) + ")"
                if block.is_sealed
                else Sql(
                    f"(SELECT {_ALL_COLUMNS} FROM unsealed WHERE seq BETWEEN ? AND ?)", (block.first, block.last_seq)
                )
                for _, block in sorted(self._blocks.items())
            ]

    def superseded(self) -> str:
        """A condition over `seq`."""
        with self._lock:  # the numbers are ours
            return f"({' OR '.join(f'(seq >= {low} AND seq < {high})' for low, high in self._abandoned) or 'false'})"

    def read_blocks(self, columns: str, condition: Sql, files: Sequence[Path]) -> list[tuple[Any, ...]]:
        """SELECT `columns` of the rows in `files` and in `unsealed` for which `condition` holds, in the order of writing.

        Raises:
            RunError: a block is damaged, or was deleted meanwhile.
        """
        sql = (
            Sql(f"SELECT {columns} FROM ") + self.source(files) + " WHERE " + condition + " ORDER BY seq, rollout_index"
        )
        with self._cursor() as cursor, reading(self.folder):
            return cursor.execute(sql.text, sql.parameters).fetchall()

    def source(self, files: Sequence[Path]) -> Sql:
        """A relation with all columns: the rows of `files`, and those that are still JSON lines."""
        unsealed = Sql(f"(SELECT {_ALL_COLUMNS} FROM unsealed")
        return (unsealed + " UNION ALL " + self._from_files(files) if files else unsealed) + ")"

    def _from_files(self, files: Sequence[Path]) -> Sql:
        """A SELECT of all columns of these blocks (>= 1), by the names of today."""
        old = [sql_path(path) for path in files if path.name in self._old]
        new = [sql_path(path) for path in files if path.name not in self._old]
        kinds = ((_ALL_COLUMNS, new), (_OLD_COLUMNS, old))
        first, *rest = (Sql(f"SELECT {columns} FROM read_parquet(?)", (names,)) for columns, names in kinds if names)
        return first + " UNION ALL " + rest[0] if rest else first

    def condition(self, query: Query) -> Sql:
        """What a query says, over the view `rollouts`. One that names texts is searched for in the blocks now, where they were not
        searched before; other questions go on meanwhile.

        Raises:
            QueryError: a value of the store does not allow it.
        """
        if not query.reads_blocks:
            return Sql(query.sql)
        if query.parts:
            first, second = (self.condition(part) for part in query.parts)
            return Sql("(") + first + " AND " + second + ")"
        with self._search_lock:
            search = self._searches.pop(query.sql, None) or self._new_search()
            self._searches[query.sql] = search  # the one used last stands last
            self._search(search, query)
            while len(self._searches) > _MAX_SEARCHES:
                self._forget_search(next(iter(self._searches)))
            return Sql(f"row_key IN (SELECT row_key FROM {search.table})")

    def _new_search(self) -> _Search:
        self._num_searches += 1
        search = _Search(table=f"match_{self._num_searches}")
        with self._lock:
            self._connection.execute(f"CREATE TABLE {search.table} (row_key BIGINT)")
        return search

    def _search(self, search: _Search, query: Query) -> None:
        """Search what was written since the last time."""
        with self._lock:
            until, files = self._last_seq(), self.sealed_blocks(after_seq=search.until_seq)
        if search.until_seq >= until:
            return
        texts = Sql(f"(SELECT {ROW_KEY} AS row_key, {BLOCK_SQL} FROM ") + self.source(files)
        texts += Sql(" WHERE seq > ? AND seq <= ?)", (search.until_seq, until))
        found = Sql(f"INSERT INTO {search.table} SELECT row_key FROM rollouts JOIN ") + texts
        found += f" USING (row_key) WHERE {query.sql}"
        with self._cursor() as cursor, reading(self.folder), of_query(query):
            cursor.execute(found.text, found.parameters)
        search.until_seq = until

    def _forget_search(self, sql: str) -> None:
        with self._lock:
            self._connection.execute(f"DROP TABLE {self._searches.pop(sql).table}")

    def _last_seq(self) -> int:
        return max((block.last_seq for block in self._blocks.values()), default=-1)

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[DuckDBPyConnection]:
        """Of its own: those of several threads do not wait for each other. Ends at the deadline of `time_limit`."""
        with self._lock:
            cursor = self._connection.cursor()
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
        with self._search_lock, self._lock:
            before, known, last = self.generation, set(self._blocks), self._last_seq()
            for attempt in range(1, _LISTINGS + 1):
                try:
                    self._ingest(self._list())
                    break
                except FileNotFoundError as error:
                    if attempt == _LISTINGS:
                        raise RunError(f"the blocks in {self.folder} change faster than they can be read") from error
            self._supersede()
            is_late = any(first < last for first in self._blocks.keys() - known)  # behind what was searched
            for sql in [*self._searches] if self.generation != before else ():
                if is_late or _CHANGING.search(sql):
                    self._forget_search(sql)
            return self.generation != before

    def damage(self) -> list[str]:
        """Blocks and lines that cannot be read."""
        with self._lock:
            return list(self._problems.values())

    def torn(self) -> list[str]:
        """Last lines that are not whole, and not being written."""
        with self._lock:
            written = max(self._blocks, default=-1) if has_writer(self.folder) else -1
            return [
                f"the last line of {block.path.name} is torn (the writer was killed, or the disk was full): "
                f"{rest} bytes are left out, at most one group"
                for block in self._blocks.values()
                if not block.is_sealed and block.first != written and (rest := size_of(block.path) - block.offset) > 0
            ]

    def _ingest(self, listing: dict[int, Block]) -> None:
        if self._blocks.keys() - listing.keys():
            listing = self._list()  # one may have been sealed while the folder was listed: now its new name is there
            for first in self._blocks.keys() - listing.keys():  # deleted: the store outgrew `record.rollouts.max_gb`
                with self._change():
                    self._delete(self._blocks.pop(first))
                self.generation += 1
        for first, block in listing.items():
            if not block.is_sealed:  # first: a moment later they may be sealed
                self._add_lines(self._blocks.get(first) or _Block(first=first, path=block.path, is_sealed=False))
        is_done = {block.path for block in self._blocks.values()}
        sealed = [block.path for block in listing.values() if block.is_sealed and block.path not in is_done]
        self._add_sealed([path for path in sealed if self._failed.get(path) != _stamp(path)])
        for first in listing.keys() - self._blocks.keys():  # the Parquet file is damaged
            if (lines := self.folder / open_name(first)).exists():
                self._add_lines(_Block(first=first, path=lines, is_sealed=False))

    def _list(self) -> dict[int, Block]:
        return {block.first_seq: block for block in find_blocks(self.folder)}

    def _add_sealed(self, paths: Sequence[Path]) -> None:
        """All at once, which is fast; one by one where a file is damaged, to find out which. What was known of their lines goes."""
        if not paths:
            return
        blocks = [_sealed(path) for path in paths]
        before = [known for block in blocks if (known := self._blocks.get(block.first)) is not None]
        try:
            self._insert_sealed(paths, before)
        except VersionError:
            raise
        except RunError as error:
            if len(paths) > 1:
                for path in paths:
                    self._add_sealed([path])
                return
            self._failed[paths[0]] = _stamp(paths[0])
            self._problems[paths[0].name] = (
                f"{paths[0]} is damaged, its rollouts are left out ({error}); restore it from a copy, or remove it"
            )
            return
        for block in blocks:
            self._blocks[block.first] = block
            self._problems.pop(block.path.name, None)
        if {(each.first, each.last_seq) for each in blocks} != {(each.first, each.last_seq) for each in before}:
            self.generation += 1

    def _insert_sealed(self, paths: Sequence[Path], before: Sequence[_Block]) -> None:
        """
        Raises:
            VersionError: a block is of another version. RunError: one cannot be read. FileNotFoundError: one has gone.
        """
        names = [sql_path(path) for path in paths]
        try:
            with reading(self.folder), self._change():
                for name, version in self._connection.execute(_VERSIONS, (names,)).fetchall():
                    if _is_old(str(name), bytes(version).decode("utf-8", "replace")):
                        self._old.add(Path(str(name)).name)
                for block in before:
                    self._delete(block)
                self._add_rows(Sql("(") + self._from_files(paths) + ")")
        except RunError:
            for path in paths:
                path.stat()  # FileNotFoundError: list again
            raise

    def _add_lines(self, block: _Block) -> None:
        """The lines behind `block.offset` that are whole."""
        with block.path.open("rb") as file:
            while True:
                self._blocks[block.first] = block
                file.seek(block.offset)
                chunk = file.read(_CHUNK_BYTES)
                while chunk and b"\n" not in chunk and len(more := file.read(_CHUNK_BYTES)):
                    chunk += more
                lines = [line + b"\n" for line in chunk.split(b"\n")[:-1]]
                if not lines:
                    return
                _check_line(block.path, lines[0])
                last = self._add_groups(block.path, lines, block.num_lines + 1)
                self.generation += 1
                block = replace(
                    block,
                    offset=block.offset + sum(map(len, lines)),
                    num_lines=block.num_lines + len(lines),
                    last_seq=max(block.last_seq, last),
                )

    def _add_groups(self, path: Path, lines: Sequence[bytes], number: int) -> int:
        """The highest seq (-1: none) of the lines of which the first has this number; damaged ones are left out."""
        try:
            return self._insert_lines(lines)
        except _DamagedLinesError as error:
            if len(lines) == 1:
                self._problems[f"{path.stem}:{number}"] = f"{path}:{number}: the line is damaged and left out: {error}"
                return -1
        half = len(lines) // 2
        return max(self._add_groups(path, lines[:half], number), self._add_groups(path, lines[half:], number + half))

    def _insert_lines(self, lines: Sequence[bytes]) -> int:
        import duckdb

        file = self._scratch / "lines.jsonl"
        file.write_bytes(b"".join(lines))
        select = select_from_lines(max(map(len, lines)))
        try:
            with reading(self.folder, (duckdb.InvalidInputException, duckdb.ConversionException)), self._change():
                self._connection.execute(f"INSERT INTO unsealed {select}", ([sql_path(file)],))
                new = _NEW.format("unsealed")
                found = self._connection.execute(f"SELECT count(DISTINCT seq), max(seq) FROM {new}").fetchone()
                assert found is not None
                if found[0] != len(lines):
                    raise _DamagedLinesError("it has not the fields of a group")
                self._add_rows(Sql(new))
        except (duckdb.InvalidInputException, duckdb.ConversionException) as error:
            raise _DamagedLinesError(first_line(str(error))) from error
        return int(found[1])

    def _add_rows(self, source: Sql) -> None:
        """The rows of a relation with all columns, and their groups."""
        names = ", ".join(f'"{name}"' for name in INDEXED)
        insert = Sql(f"INSERT INTO rows SELECT {names}, {self.superseded()}, {ROW_KEY} FROM ") + source
        self._connection.execute(insert.text, insert.parameters)
        self._connection.execute("INSERT INTO groups " + GROUPS_SQL.format(_NEW.format("rows")))

    def _delete(self, block: _Block) -> None:
        for table in ("rows", "groups", "unsealed"):
            self._connection.execute(f"DELETE FROM {table} WHERE seq BETWEEN ? AND ?", (block.first, block.last_seq))

    def _supersede(self) -> None:
        bounds = [(each.from_seq, each.until_seq) for each in read_abandoned(self.folder)]
        if bounds == self._abandoned:
            return
        self._abandoned = bounds
        with self._change():
            for table in ("rows", "groups"):
                self._connection.execute(f"UPDATE {table} SET superseded = {self.superseded()}")
        self.generation += 1

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


def _sealed(path: Path) -> _Block:
    """By its name: block-FIRST-LAST.parquet."""
    _, first, last = path.stem.split("-")
    return _Block(first=int(first), path=path, is_sealed=True, last_seq=int(last))


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _check_line(path: Path, line: bytes) -> None:
    """Raises VersionError. A line that says no version is damaged, which is found out later."""
    try:
        schema = orjson.loads(line).get("schema")
    except (ValueError, AttributeError):
        return
    if isinstance(schema, int):
        _is_old(str(path), str(schema))


def _is_old(name: str, version: str) -> bool:
    """Whether the format of the block `name` is OLD_SCHEMA; VersionError where it is not ours either."""
    if version not in (str(SCHEMA), str(OLD_SCHEMA)):
        raise VersionError(
            f"{name} has format {version} of the rollout store, this version reads {OLD_SCHEMA} and {SCHEMA}; read it with the "
            "version of grpo-async that wrote it"
        )
    return version == str(OLD_SCHEMA)


@contextlib.contextmanager
def reading(folder: Path, others: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns DuckDB's errors of reading into ours, but for `others`. Its message names the file."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        if isinstance(error, (duckdb.InterruptException, *others)):  # see `time_limit`
            raise
        raise RunError(f"cannot read the rollouts in {folder}: {first_line(str(error))}") from error


@contextlib.contextmanager
def of_query(query: Query) -> Iterator[None]:
    """What a value of the store makes of a query that is right in itself (a text that is not a number) is an error of the query;
    what is wrong with a file is not."""
    import duckdb

    try:
        yield
    except (duckdb.InterruptException, duckdb.IOException, duckdb.PermissionException):
        raise
    except duckdb.Error as error:
        problem = first_line(str(error))
        if not query.text or re.search("parquet|decompress", problem, re.I):
            raise
        raise QueryError(query.text, 0, len(query.text), problem) from error


def _connect(folders: Sequence[Path], scratch: Path) -> DuckDBPyConnection:
    """A database that reaches files in `folders` and no others, and takes half of the machine's memory at most."""
    memory = max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, _MIN_MEMORY)
    connection = connect(
        threads=str(usable_cpus()),
        memory_limit=f"{memory // 1024}KiB",
        temp_directory=str(scratch / "spilled"),
    )
    connection.execute("SET parquet_metadata_cache = true")  # sealed blocks never change
    paths = [each.absolute() for each in folders]
    # A pattern is checked as it stands, and then the files that it names.
    readable = ", ".join(quote(f"{name}/") for path in paths for name in dict.fromkeys((str(path), sql_path(path))))
    connection.execute(f"SET allowed_directories = [{readable}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection
