"""Writes the rollouts that match a query to a separate file: JSON lines or Parquet, one row per rollout.

The columns are those of the store (`schema`) and `superseded`. The file appears under its name when it is whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from grpo_async.errors import ConfigError, RunError
from grpo_async.store.query import Query
from grpo_async.store.table import RolloutTable
from grpo_async.utils.files import replacing
from grpo_async.utils.safe_text import BIDI_CONTROLS

Format: TypeAlias = Literal["jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


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
    writable = (out.absolute().parent,) if isinstance(out, Path) else ()
    with RolloutTable.open(folder, writable=writable) as table:
        if table.damage and not skip_damaged:
            listed = "\n  ".join(table.damage)
            raise RunError(f"some rollouts cannot be read:\n  {listed}\n--skip-damaged exports the others")
        counts = table.count(query, with_superseded=with_superseded)
        if isinstance(out, Path):
            _to_file(table, out, format_, query, with_superseded=with_superseded)
        else:
            _to_stream(table, out, query, with_superseded=with_superseded)
        return Exported(rollouts=counts.rollouts, groups=counts.groups, notes=table.notes)


def _to_file(table: RolloutTable, out: Path, format_: Format, query: Query, *, with_superseded: bool) -> None:
    try:
        with replacing(out.absolute()) as temporary:
            if format_ == "parquet":
                temporary.touch()  # DuckDB's error would be taken for one of reading the rollouts
                temporary.unlink()  # over a file, DuckDB would write to a temporary one of its own
                table.write_parquet(temporary, query, with_superseded=with_superseded)
                return
            with temporary.open("wb") as file:
                _to_stream(table, file, query, with_superseded=with_superseded)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; check the folder's permissions and free space") from error


def _to_stream(table: RolloutTable, out: BinaryIO, query: Query, *, with_superseded: bool) -> None:
    for line in table.dump_json(query, with_superseded=with_superseded):
        out.write(printable(line).encode() + b"\n")
    out.flush()


_UNSAFE = re.compile(rf"[\x7f-\x9f{BIDI_CONTROLS}]")


def printable(line: str) -> str:
    """`line`, one JSON value, with the control characters above 0x7e and the bidirectional ones as \\u escapes: the same value.

    JSON has these characters inside of strings only, and those below 0x20 escaped already.
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
