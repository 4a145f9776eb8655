"""The store in memory, without texts and tokens: what filters, sorts and counts are made of.

    blocks --refresh--> `tables`: rows, groups, loose
    a search in the texts --lookup--> match_N, the rollouts that it found

A `refresh` reads new blocks, and of a block that grew the new lines. Rows are never
changed but for `superseded`, so what was read or searched once is not read again. A block that is sealed between the listing and
the reading is found under its other name by listing again.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_async.errors import RunError
from grpo_async.store.block_checks import bounds, check_schema, problem_of
from grpo_async.store.blocks import Block, find_blocks, open_name, sql_path
from grpo_async.store.branches import read_branches
from grpo_async.store.query_sql import Sql
from grpo_async.store.schema import COLUMN_NAMES
from grpo_async.store.tables import ROW_KEY, Tables, VersionError, reading
from grpo_async.store.time_limit import interrupting
from grpo_async.store.writer_lock import has_writer

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LISTINGS = 5  # a block changes its name once, and blocks are sealed seconds apart
_CHUNK_BYTES = 32 * 1024 * 1024  # of lines that are read at once
_MOST_SEARCHES = 64  # that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What is known of a block. `offset`: bytes of the lines that were taken up; `last_seq` -1: no row yet."""

    first: int
    path: Path
    is_sealed: bool
    offset: int = 0
    num_lines: int = 0
    last_seq: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    table: str
    until_seq: int  # what was written up to here was searched


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
        self._searches: dict[Sql, _Search] = {}
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

    def stream(self, sql: Sql, rows_at_once: int) -> Iterator[tuple[Any, ...]]:
        """As `fetch`, a few rows at a time."""
        with self._cursor() as cursor, reading(self.folder):
            cursor.execute(sql.text, sql.parameters)
            while rows := cursor.fetchmany(rows_at_once):
                yield from rows

    def blocks_of(self, seqs: Sequence[int]) -> list[Path]:
        """The sealed blocks that hold rows of these groups; others are in `loose`."""
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
            return [
                block.path
                for _, block in sorted(self._blocks.items())
                if block.is_sealed and block.last_seq > after_seq
            ]

    def parts(self) -> list[Sql]:
        """The whole store in the order of writing, as relations with all columns, each small enough for the memory."""
        names = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
        with self._lock:
            return [
                Sql(f"(SELECT {names} FROM read_parquet(?))", ([sql_path(block.path)],))
                if block.is_sealed
                else Sql(f"(SELECT {names} FROM loose WHERE seq BETWEEN ? AND ?)", (block.first, block.last_seq))
                for _, block in sorted(self._blocks.items())
            ]

    def superseded(self) -> str:
        """A condition over `seq`."""
        with self._lock:
            return self._tables.superseded

    def last_seq(self) -> int:
        with self._lock:
            return max((block.last_seq for block in self._blocks.values()), default=-1)

    def read_blocks(self, columns: str, condition: Sql, files: Sequence[Path]) -> list[tuple[Any, ...]]:
        """SELECT `columns` of the rows in `files` and in `loose` for which `condition` holds, in the order of writing.

        Raises:
            RunError: a block is damaged, or was deleted meanwhile.
        """
        source = self.source(files)
        sql = Sql(f"SELECT {columns} FROM ") + source + " WHERE " + condition + " ORDER BY seq, rollout_index"
        with self._cursor() as cursor, reading(self.folder):
            return cursor.execute(sql.text, sql.parameters).fetchall()

    def source(self, files: Sequence[Path], *, with_loose: bool = True) -> Sql:
        """A relation with all columns: the rows of `files` and those that are JSON lines still."""
        names = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
        loose = f"SELECT {names} FROM loose"
        if not files:
            return Sql(f"({loose}{'' if with_loose else ' LIMIT 0'})")
        sealed = f"SELECT {names} FROM read_parquet(?)"
        parameters = ([sql_path(path) for path in files],)
        return Sql(f"({sealed} UNION ALL {loose})" if with_loose else f"({sealed})", parameters)

    def lookup(self, condition: Sql) -> Sql:
        """A condition over `r` that holds for the rollouts for which `condition` over the columns of a block holds. The blocks are
        searched now, as far as they were not before; other questions and `refresh` go on meanwhile."""
        with self._search_lock:
            found = self._searches.pop(condition, None)
            if found is None:
                self._num_searches += 1
                found = _Search(table=f"match_{self._num_searches}", until_seq=-1)
                with self._lock:
                    self._tables.execute(f"CREATE TABLE {found.table} (row_key BIGINT)")
            while (searched := self._search(found, condition)) is None:
                pass  # a block moved meanwhile, which each does once
            self._searches[condition] = searched  # the last one used stands last
            while len(self._searches) > _MOST_SEARCHES:
                oldest = next(iter(self._searches))
                with self._lock:
                    self._tables.execute(f"DROP TABLE {self._searches.pop(oldest).table}")
            return Sql(f"r.row_key IN (SELECT row_key FROM {found.table})")

    def _search(self, search: _Search, condition: Sql) -> _Search | None:
        """Search what is new; None where a block moved from the lines to a file meanwhile: its rows may have been missed."""
        with self._lock:
            until, moves = self.last_seq(), self._moves
            files = self.sealed_blocks(after_seq=search.until_seq)
        if search.until_seq >= until:
            return search
        select = Sql(f"INSERT INTO {search.table} SELECT {ROW_KEY} FROM ") + self.source(files) + " WHERE "
        select += Sql("seq > ? AND seq <= ? AND ", (search.until_seq, until)) + condition
        with self._cursor() as cursor, reading(self.folder):
            cursor.execute(select.text, select.parameters)
        with self._lock:
            return replace(search, until_seq=until) if moves == self._moves else None

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
        """Take up what was written since the last time; whether rows came, went or were superseded.

        Raises:
            RunError: the folder cannot be read, or was written by a version with another format.
        """
        with self._lock:
            before = self.generation
            for attempt in range(1, _LISTINGS + 1):
                try:
                    self._take_up(self._list())
                    break
                except FileNotFoundError:
                    if attempt == _LISTINGS:
                        raise RunError(f"the blocks in {self.folder} change faster than they can be read") from None
            if self._tables.supersede(read_branches(self.folder)):
                self.generation += 1
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

    def _take_up(self, listing: dict[int, Block]) -> None:
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
            self._say_damaged(paths[0], error)
            return
        self._tables.commit()
        for path in paths:
            first, last = bounds(path)
            self._blocks[first] = _Block(first=first, path=path, is_sealed=True, last_seq=last)
            self._problems.pop(path.name, None)
        self.generation += 1

    def _say_damaged(self, path: Path, error: RunError) -> None:
        stat = path.stat()
        self._failed[path] = (stat.st_size, stat.st_mtime_ns)
        self._problems[path.name] = (
            f"{path} is damaged, its rollouts are left out ({error}); restore it from a copy, or remove it"
        )

    def _add_rest_of_sealed(self, known: _Block, path: Path) -> None:
        """A block whose lines, or the first of them, were taken up before it was sealed."""
        try:
            self._tables.stage_sealed([path], after_seq=known.last_seq)
        except RunError as error:
            self._say_damaged(path, error)
            return
        if self._tables.commit(no_longer_loose=(known.first, known.last_seq)):
            self.generation += 1
        self._moves += 1
        self._blocks[known.first] = replace(known, path=path, is_sealed=True, last_seq=bounds(path)[1])
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
        check_schema(block.path, lines[0])
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
            if (problem := problem_of(line)) is None:
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
