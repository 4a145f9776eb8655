"""The tables in memory that `Index` fills, and their database.

    rows     one row per rollout: the small columns, and `superseded`
    groups   one row per group: its rollouts taken together
    unsealed all columns of the groups that are still JSON lines
    rollouts the view of queries (`query_names`)

What is read is staged first, and comes into the tables as one change. One thread at a time may stage and change; cursors of other
threads see the state before or after.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.errors import RunError
from grpo_async.store.blocks import Branch, sql_path
from grpo_async.store.query_names import INDEXED, MACRO_SQL, VIEW_SQL
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, SCHEMA, select_from_lines

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ROW_KEY = "(seq * 65536 + coalesce(rollout_index, 65535))"
"""One number per row; a group without rollouts has a row of its own."""

_SMALLEST_MEMORY = 256 * 1024 * 1024
_VERSIONS = "SELECT file_name, value FROM parquet_kv_metadata(?) WHERE key = 'grpo_async_schema'"
_GROUPS = """
SELECT seq, any_value(group_id) AS group_id, any_value(prompt_id) AS prompt_id, any_value(prompt_hash) AS prompt_hash,
    any_value(step) AS step, any_value(group_status) AS status, count(rollout_index)::INTEGER AS size,
    count(reward)::INTEGER AS num_scored, any_value(group_reward_mean) AS reward_mean,
    any_value(group_reward_std) AS reward_std, min(reward) AS reward_min, max(reward) AS reward_max,
    count_if(truncated)::INTEGER AS num_truncated, count_if(status = 'failed')::INTEGER AS num_failed,
    coalesce(avg(num_tokens), 0.0) AS num_tokens_mean, coalesce(max(num_tokens), 0)::INTEGER AS num_tokens_max,
    coalesce(avg(num_turns), 0.0) AS num_turns_mean, coalesce(sum(num_tool_calls), 0)::INTEGER AS num_tool_calls,
    coalesce(sum(num_failed_tool_calls), 0)::INTEGER AS num_failed_tool_calls,
    min(version_min) AS version_min, max(version_max) AS version_max, max(staleness) AS staleness,
    avg(entropy_mean) AS entropy_mean, max(ratio_max) AS ratio_max, avg(clipped_share) AS clipped_share,
    avg(masked_share) AS masked_share, avg(mismatch_mean) AS mismatch_mean, min(started_at) AS started_at,
    max(total_duration_s) AS total_duration_s, any_value(written_at) AS written_at,
    any_value(superseded) AS superseded
FROM {source} GROUP BY seq
"""


class VersionError(RunError):
    """A block is in a format of another version."""


class Tables:
    """Of the store in `folder`.

    Args:
        scratch: a folder for temporary files, of the caller.
        writable: further folders that may be written to.
        threads: None: one per core. memory_bytes: None: half of the machine's.
    """

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        *,
        writable: Sequence[Path] = (),
        threads: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self._folder, self._scratch = folder, scratch
        self._branches: list[tuple[int, int]] = []
        self._connection = _connect((folder, scratch, *writable), scratch, threads, memory_bytes)
        create_tables(self._connection)

    def close(self) -> None:
        self._connection.close()

    def cursor(self) -> DuckDBPyConnection:
        """A connection of its own to the same tables, to be closed by the caller."""
        return self._connection.cursor()

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> None:
        self._connection.execute(sql, parameters)

    @property
    def superseded(self) -> str:
        """A condition over `seq`."""
        return f"({_superseded(self._branches)})"

    def stage_sealed(self, paths: Sequence[Path], *, after_seq: int = -1) -> None:
        """Read the rows behind `after_seq` of sealed blocks.

        Raises:
            VersionError: a block is of another version. RunError: one cannot be read. FileNotFoundError: one has gone.
        """
        names = [sql_path(path) for path in paths]
        try:
            with reading(self._folder):
                versions = self._connection.execute(_VERSIONS, (names,)).fetchall()
                for name, version in versions:
                    check_version(str(name), bytes(version).decode("utf-8", "replace"))
                self._connection.execute(
                    f"CREATE OR REPLACE TABLE staged AS SELECT {self._indexed()} FROM read_parquet(?) WHERE seq > ?",
                    (names, after_seq),
                )
        except RunError:
            for path in paths:
                path.stat()  # FileNotFoundError: list again
            raise

    def _indexed(self) -> str:
        """The columns of the table `rows`, of a relation with all columns."""
        names = ", ".join(f'"{name}"' for name in INDEXED)
        return f"{names}, {self.superseded} AS superseded, {ROW_KEY} AS row_key"

    def stage_lines(self, chunk: bytes, longest: int) -> tuple[int, int]:
        """Read whole lines, the longest of `longest` bytes; the number of groups, and the highest seq (-1: none).

        Raises:
            RunError: a line cannot be read.
        """
        file = self._scratch / "lines.jsonl"
        file.write_bytes(chunk)
        with reading(self._folder):
            select = select_from_lines(longest)
            self._connection.execute(f"CREATE OR REPLACE TABLE new_lines AS {select}", ([sql_path(file)],))
            self._connection.execute(f"CREATE OR REPLACE TABLE staged AS SELECT {self._indexed()} FROM new_lines")
        found = self._connection.execute("SELECT count(DISTINCT seq), coalesce(max(seq), -1) FROM staged").fetchone()
        assert found is not None
        return int(found[0]), int(found[1])

    def commit(self, *, with_lines: bool = False, now_sealed: tuple[int, int] | None = None) -> int:
        """Ingest what is staged, as one change; the number of its rows.

        Args:
            with_lines: it was staged by `stage_lines`.
            now_sealed: first and last seq of lines that are in a sealed block now.
        """
        counted = self._connection.execute("SELECT count(*), (SELECT count(*) FROM rows) FROM staged").fetchone()
        assert counted is not None
        with self._change():
            self._connection.execute("INSERT INTO groups BY NAME " + _GROUPS.format(source="staged"))
            if counted[1]:
                self._connection.execute("INSERT INTO rows BY NAME SELECT * FROM staged")
            else:  # the first: nothing is copied
                self._connection.execute("DROP TABLE rows")
                self._connection.execute("ALTER TABLE staged RENAME TO rows")
            if with_lines:
                self._connection.execute("INSERT INTO unsealed BY NAME SELECT * FROM new_lines")
            if now_sealed is not None:
                self._connection.execute("DELETE FROM unsealed WHERE seq BETWEEN ? AND ?", now_sealed)
        for table in ("staged", "new_lines"):
            self._connection.execute(f"DROP TABLE IF EXISTS {table}")
        return int(counted[0])

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

    def delete(self, first: int, last: int) -> None:
        """Forget groups."""
        with self._change():
            for table in ("rows", "groups", "unsealed"):
                self._connection.execute(f"DELETE FROM {table} WHERE seq BETWEEN ? AND ?", (first, last))

    def supersede(self, branches: Sequence[Branch]) -> bool:
        """Heed these branches from now on; whether they are others than before."""
        bounds = [(branch.from_seq, branch.until_seq) for branch in branches]
        if bounds == self._branches:
            return False
        self._branches = bounds
        with self._change():
            for table in ("rows", "groups"):
                self._connection.execute(f"UPDATE {table} SET superseded = {self.superseded}")
        return True


def create_tables(connection: DuckDBPyConnection) -> None:
    """The tables, empty, and what queries see of them."""
    types = {column.name: column.type for column in COLUMNS}
    indexed = ", ".join(f'"{name}" {types[name]}' for name in INDEXED)
    every = ", ".join(f'"{name}" {types[name]}' for name in COLUMN_NAMES)
    connection.execute(f"CREATE TABLE rows ({indexed}, superseded BOOLEAN, row_key BIGINT)")
    connection.execute(f"CREATE TABLE unsealed ({every})")
    connection.execute("CREATE TABLE groups AS " + _GROUPS.format(source="rows"))
    connection.execute(MACRO_SQL)
    connection.execute(VIEW_SQL)


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turns DuckDB's errors of reading into ours. Its message names the file."""
    import duckdb

    try:
        yield
    except duckdb.InterruptException:
        raise  # see `time_limit`
    except duckdb.Error as error:
        first_line = str(error).split("\n", 1)[0]
        raise RunError(f"cannot read the rollouts in {folder}: {first_line}") from error


def _connect(
    folders: Sequence[Path], scratch: Path, threads: int | None, memory_bytes: int | None
) -> DuckDBPyConnection:
    """A database in memory that reaches files in `folders` and no others, and loads no extensions."""
    import duckdb

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = memory_bytes or max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2, _SMALLEST_MEMORY)
    connection = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "threads": str(threads or cores),
            "memory_limit": f"{memory // 1024}KiB",
            "temp_directory": str(scratch / "spilled"),
        },
    )
    connection.execute("SET parquet_metadata_cache = true")  # sealed blocks never change
    paths = [each.absolute() for each in folders]
    # A pattern is checked as it stands, and then the files that it names.
    readable = ", ".join(_literal(f"{name}/") for path in paths for name in dict.fromkeys((str(path), sql_path(path))))
    connection.execute(f"SET allowed_directories = [{readable}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _superseded(branches: Sequence[tuple[int, int]]) -> str:
    """SQL; the numbers are ours."""
    return " OR ".join(f"(seq >= {int(low)} AND seq < {int(high)})" for low, high in branches) or "false"


def check_version(name: str, version: str) -> None:
    """Raises VersionError where the format of the block `name` is not ours."""
    if version != str(SCHEMA):
        raise VersionError(
            f"{name} has format {version} of the rollout store, this version reads {SCHEMA}; read it with the version of "
            "grpo-async that wrote it"
        )
