"""Folders that stand whole under their name, and on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
        aside: beside `folder`; what an earlier call left there goes.

    Raises:
        OSError: one of them cannot be renamed.
    """
    if folder.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    os.replace(made, folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
