"""Rewrites blocks of JSON lines as Parquet files: `python -m grpo_async.store.seal PARENT_PID LEVEL FOLDER NAME...`.

A process of its own, at the lowest priority: neither the interpreter's lock nor the caches of the training process are touched.
The lines are removed last, after the Parquet file is on the disk with its name and has been counted.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.store.blocks import TEMPORARY_SUFFIX, open_name, sealed_name
from grpo_async.store.database import connect, quote, sql_path
from grpo_async.store.schema import SCHEMA, select_from_lines
from grpo_async.utils.atomic_files import sync
from grpo_async.utils.lifetime import die_with_parent

ROWS_PER_GROUP = 2048
"""Rollouts per row group of the Parquet files: what is decompressed to show one of them."""


def seal_block(path: Path, *, compression_level: int) -> Path:
    """Seal a block of whole lines. Returns the Parquet file, which replaces it.

    Raises:
        RunError: the lines cannot be read or the file not be written; the block stays as it is.
    """
    import duckdb

    folder, num_bytes = path.parent, path.stat().st_size
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with connect(threads="1", temp_directory="") as connection:
            connection.execute(
                f"COPY ({select_from_lines(num_bytes)}) TO {quote(str(temporary))} (FORMAT parquet, COMPRESSION zstd, "
                f"COMPRESSION_LEVEL {int(compression_level)}, ROW_GROUP_SIZE {ROWS_PER_GROUP}, "
                f"KV_METADATA {{grpo_async_schema: '{SCHEMA}'}})",
                [sql_path(path)],
            )
            found = connection.execute(
                "SELECT min(seq), max(seq), count(DISTINCT seq) FROM read_parquet(?)", [sql_path(temporary)]
            ).fetchone()
    except duckdb.Error as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot seal {path}: {error}") from error
    assert found is not None
    first, last, num_groups = found
    num_lines = _num_lines(path)
    if num_groups != num_lines or path.name != open_name(first):
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot seal {path}: it has {num_lines} lines, and {num_groups} groups from seq {first} on")
    sync(temporary)
    sealed = folder / sealed_name(first, last)
    os.replace(temporary, sealed)
    sync(folder)
    path.unlink(missing_ok=True)
    return sealed


def main(arguments: list[str]) -> int:
    parent, level, folder, *names = arguments
    die_with_parent(int(parent))  # one that outlived a killed run would rename files under the feet of the next
    os.nice(19)
    os.umask(0o077)
    failed = False
    for name in names:
        try:
            seal_block(Path(folder) / name, compression_level=int(level))
        except FileNotFoundError:
            continue  # deleted to make room
        except (RunError, OSError) as error:
            print(f"{name} stays as JSON lines: {error}", file=sys.stderr)
            failed = True
    return int(failed)


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(len(re.findall(b"\n", part)) for part in iter(lambda: file.read(1 << 20), b""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
