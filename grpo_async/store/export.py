"""Writes the rollouts that match a query to a separate file: JSON lines or Parquet, one row per rollout.

The columns are those of the store (`schema`) and `superseded`. The file appears under its name when it is whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeAlias

from grpo_async.errors import ConfigError, RunError
from grpo_async.store.database import quote
from grpo_async.store.query import Query
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, PARQUET_OPTIONS
from grpo_async.store.table import RolloutTable, where
from grpo_async.utils.files import replacing
from grpo_async.utils.safe_text import BIDI_CONTROLS

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Format: TypeAlias = Literal["jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_ROWS_AT_ONCE = 256
_KEY = "(seq, coalesce(rollout_index, -1))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. `notes`: what the reader of the file must know (see RolloutTable.notes)."""

    rollouts: int
    groups: int
    notes: list[str]


def export_rollouts(
    folder: Path,
    out: Path | BinaryIO,
    format_: Format,
    query: Query,
    *,
    with_superseded: bool = False,
    skip_damaged: bool = False,
) -> Exported:
    """Write what the folder `rollouts` (or that of an evaluation) holds now.

    Args:
        out: a file, which is replaced; or an open stream (JSON lines only).
        skip_damaged: leave out blocks and lines that cannot be read, and say so in the notes.

    Raises:
        ConfigError: the file cannot be written where it was asked for.
        QueryError: a value of the store does not allow the query (a text that is not a number).
        RunError: something is damaged; without `skip_damaged` nothing is written then.
    """
    if isinstance(out, Path) and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}; make it first")
    writable = out.absolute().parent if isinstance(out, Path) else None
    with RolloutTable(folder, writable=writable) as table:
        if table.damage and not skip_damaged:
            listed = "\n  ".join(table.damage)
            raise RunError(f"some rollouts cannot be read:\n  {listed}\n--skip-damaged exports the others")
        counts = table.count(query, with_superseded=with_superseded)
        with _matching(table, query, with_superseded) as cursor:
            if isinstance(out, Path):
                _to_file(cursor, table, out, format_)
            else:
                _to_stream(cursor, table, out)
        return Exported(rollouts=counts.rollouts, groups=counts.groups, notes=table.notes)


@contextmanager
def _matching(table: RolloutTable, query: Query, with_superseded: bool) -> Iterator[DuckDBPyConnection]:
    """A cursor with the table `matching`, of the keys of the rows that match."""
    with table.cursor(query) as cursor:
        cursor.execute(f"CREATE TEMP TABLE matching AS SELECT {_KEY} AS key FROM {where(query, with_superseded)}")
        yield cursor


def _to_file(cursor: DuckDBPyConnection, table: RolloutTable, out: Path, format_: Format) -> None:
    try:
        with replacing(out.absolute()) as temporary:
            if format_ == "parquet":
                temporary.touch()  # DuckDB's error would be taken for one of reading the rollouts
                temporary.unlink()  # over a file, DuckDB would write to a temporary one of its own
                names = ", ".join(f'"{name}"' for name in (*COLUMN_NAMES, "superseded"))
                # DuckDB keeps the order of rows within each SELECT, and that of the SELECTs
                parts = [
                    f"SELECT {names} FROM ({each}) WHERE {_KEY} IN (SELECT key FROM matching)" for each in table.parts()
                ]
                rows = " UNION ALL ".join(parts) or f"SELECT {names} FROM stored"
                cursor.execute(f"COPY ({rows}) TO {quote(str(temporary))} ({PARQUET_OPTIONS})")
                return
            with temporary.open("wb") as file:
                _to_stream(cursor, table, file)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; check the folder's permissions and free space") from error


def _to_stream(cursor: DuckDBPyConnection, table: RolloutTable, out: BinaryIO) -> None:
    """Block by block, in the order of writing: all of them sorted at once would not fit into memory."""
    for part in table.parts():
        cursor.execute(
            f"SELECT {_AS_JSON} FROM ({part}) WHERE {_KEY} IN (SELECT key FROM matching) ORDER BY seq, rollout_index"
        )
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            out.writelines(printable(text).encode() + b"\n" for (text,) in rows)
    out.flush()


_UNSAFE = re.compile(rf"[\x7f-\x9f{BIDI_CONTROLS}]")


def printable(line: str) -> str:
    """`line`, one JSON value, with the control characters above 0x7e and the bidirectional ones as \\u escapes: the same value.

    JSON has these characters inside of strings only, and those below 0x20 escaped already.
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def _as_json(name: str, type_: str) -> str:
    """The column as a JSON value: JSON text is not quoted again, and single precision has only the
    digits that it needs."""
    if type_ == "JSON":
        return f'"{name}"::JSON'
    if type_ == "FLOAT[]":
        return f"replace(\"{name}\"::VARCHAR, 'NULL', 'null')::JSON"
    return f'"{name}"'


_AS_JSON = (
    "to_json({"
    + ", ".join(f"'{column.name}': {_as_json(column.name, column.type)}" for column in COLUMNS)
    + ", 'superseded': superseded})::VARCHAR"
)
