"""Files and folders that stand whole under their name, and on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name next to `path` to write to; at the end it is renamed to `path`: a reader sees the old file or the new one. After an
    error nothing is left of it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Put on the disk what a file holds, or which names a folder has.

    Raises:
        OSError: the disk cannot take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(made: Path, folder: Path, *, aside: Path) -> None:
    """Rename `made` to `folder`. What stands there is renamed to `aside` first, and removed when the new one is in place: whenever
    this ends, the old one or the new one is whole.

    Args:
        aside: next to `folder`; what an earlier call left there goes.

    Raises:
        OSError: one of them cannot be renamed.
    """
    if folder.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    os.replace(made, folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
