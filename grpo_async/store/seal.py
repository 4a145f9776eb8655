"""Rewrites full blocks of JSON lines as Parquet files, and keeps the store to its size.

    RolloutStore starts python -m grpo_async.store.seal PARENT_PID FOLDER MAX_BYTES BLOCK...

A process of its own, at the lowest priority: neither the GIL nor the caches of the training process are touched.
The lines are removed last, after the Parquet file is on the disk under its name and has been counted. What cannot be sealed stays
as it is, and can be read as well; a line on stderr says so. The newest block is never deleted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.store.database import connect, quote, sql_path
from grpo_async.store.files import TEMPORARY_SUFFIX, find_blocks, sealed_name, whole_lines
from grpo_async.store.schema import PARQUET_OPTIONS, select_from_lines
from grpo_async.utils.files import sync
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.text import count


def seal_block(path: Path) -> Path:
    """Seal a block of whole lines. Returns the Parquet file, which replaces it."""
    import duckdb

    folder, temporary = path.parent, path.with_name(path.name + TEMPORARY_SUFFIX)
    num_lines = whole_lines(path)
    try:
        with connect() as connection:
            connection.execute("SET threads = 1; SET temp_directory = ''")
            connection.execute(
                f"COPY ({select_from_lines(path)}) TO {quote(str(temporary))} ({PARQUET_OPTIONS}, COMPRESSION_LEVEL 3)"
            )
            found = connection.execute(
                f"SELECT max(seq), count(DISTINCT seq) FROM read_parquet({quote(sql_path(temporary))})"
            ).fetchone()
        assert found is not None
        last, num_groups = found
        if num_groups != num_lines:
            lines, groups = count(num_lines, "line"), count(num_groups, "group")
            raise RunError(f"cannot seal {path}: it has {lines}, and {groups} can be read")
        sync(temporary)
        sealed = folder / sealed_name(path, last)
        os.replace(temporary, sealed)
    except duckdb.Error as error:
        raise RunError(f"cannot seal {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    sync(folder)
    path.unlink(missing_ok=True)
    return sealed


def enforce_max_size(folder: Path, max_bytes: int) -> None:
    """Delete the oldest blocks until the store has no more than `max_bytes`; the newest always stays."""
    sizes = {}
    for block in find_blocks(folder):
        with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
            sizes[block.path] = block.path.stat().st_size
    total = sum(sizes.values())
    for path, size in list(sizes.items())[:-1]:
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def main(arguments: list[str]) -> None:
    parent, folder, max_bytes, *names = arguments
    die_with_parent(int(parent))  # one that outlived a killed run would rename files that the next run uses
    os.nice(19)
    os.umask(0o077)
    for name in names:
        try:
            seal_block(Path(folder) / name)
            enforce_max_size(Path(folder), int(max_bytes))
        except FileNotFoundError:
            continue  # deleted to enforce the maximum size
        except (RunError, OSError) as error:
            reason = " ".join(str(error).split())
            print(f"rollouts in {folder}: {name} stays as JSON lines, which loses nothing: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
