"""Reads the rollout store group by group, also while it is being written; `table` answers queries.

The last line of an open block may be torn (a kill) or being written: it is skipped. Any other line that cannot be read is a damaged
file and an error. One block of Parquet or one line is in memory at a time. What a run wrote after the checkpoint that it later went
on from is left out, unless it is asked for: those groups were not trained in the run as it now is (`blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo_async.errors import RunError
from grpo_async.store.blocks import Block, find_blocks, read_branches, sql_path
from grpo_async.store.rows import GroupRow, from_columns, from_json
from grpo_async.store.schema import SCHEMA

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A row, and whether it was written after the checkpoint that the run went on from."""

    row: GroupRow
    superseded: bool = False


def read_groups(folder: Path) -> Iterator[GroupRow]:
    """Every group, in the order of writing; none when the folder does not exist yet.

    Raises:
        RunError: a block is damaged; the message names file and line.
    """
    return (stored.row for stored in scan_groups(folder))


def scan_groups(folder: Path, *, with_superseded: bool = False) -> Iterator[StoredGroup]:
    """As `read_groups`, saying of each whether it is superseded."""
    branches = read_branches(folder)
    for block in find_blocks(folder):
        for row in _rows_of(folder, block):
            superseded = any(branch.covers(row.seq) for branch in branches)
            if with_superseded or not superseded:
                yield StoredGroup(row, superseded)


def _rows_of(folder: Path, block: Block) -> Iterator[GroupRow]:
    if block.is_sealed:
        return _sealed_rows(block.path)
    try:
        file = block.path.open("rb")
    except FileNotFoundError:  # sealed meanwhile, or deleted to make room
        again = [each for each in find_blocks(folder) if each.first_seq == block.first_seq and each.is_sealed]
        return _sealed_rows(again[0].path) if again else iter(())
    return _line_rows(block.path, file)


def _line_rows(path: Path, file: Any) -> Iterator[GroupRow]:
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = from_json(line)
            except ValueError as error:
                raise RunError(f"{path}:{number}: the line is damaged: {error}; remove it to read the rest") from error
            yield row


def _sealed_rows(path: Path) -> Iterator[GroupRow]:
    import duckdb

    try:
        options: dict[str, Any] = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
        with duckdb.connect(config=options) as connection:
            _check_version(connection, path)
            found = connection.execute("SELECT * FROM read_parquet(?) ORDER BY seq, rollout_index", [sql_path(path)])
            names = [column[0] for column in found.description or ()]
            rows = (
                dict(zip(names, row, strict=True))
                for part in iter(lambda: found.fetchmany(_ROWS_AT_ONCE), [])
                for row in part
            )
            for _, of_group in groupby(rows, key=itemgetter("seq")):
                yield from_columns(list(of_group))
    except (duckdb.Error, ValueError) as error:
        if isinstance(error, duckdb.IOException) and not path.exists():
            return  # deleted to make room
        raise RunError(f"{path} is damaged: {error}; remove it to read the rest") from error


def _check_version(connection: Any, path: Path) -> None:
    sql = "SELECT value FROM parquet_kv_metadata(?) WHERE key = 'grpo_async_schema'"
    found = connection.execute(sql, [sql_path(path)]).fetchone()
    version = found[0].decode("utf-8", "replace") if found else "none"
    if version != str(SCHEMA):
        raise RunError(
            f"{path} has format {version} of the rollout store, this version reads {SCHEMA}; read it with the version of "
            "grpo-async that wrote it"
        )
