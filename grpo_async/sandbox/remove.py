"""Removes what the code left behind, where its directory is on disk: follows no link, however deep or locked the tree is.

The code and all its processes are dead by then, so nothing changes underneath.
"""

from __future__ import annotations

import itertools
import os
import secrets
import stat
from collections.abc import Iterator


def remove_tree(path: str) -> None:
    """Remove the directory `path` and all below it. OSError if that fails.

    Directories are moved up before they are emptied, so that a tree of any depth needs two descriptors and no recursion.
    """
    mark = secrets.token_hex(8)  # no name that the code could have given
    names = (f"{mark}-{number}" for number in itertools.count())
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        while entries := os.listdir(top):
            for entry in entries:
                if _is_directory(entry, top):
                    _lift_directories(entry, top, names)
                    os.rmdir(entry, dir_fd=top)
                else:
                    os.unlink(entry, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _lift_directories(name: str, top: int, names: Iterator[str]) -> None:
    """Empty the directory `name` of `top`: unlink its files, move its directories up to `top`."""
    os.chmod(name, 0o700, dir_fd=top)  # follows links, but this is a directory and stays one
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for entry in os.listdir(directory):
            if not _is_directory(entry, directory):
                os.unlink(entry, dir_fd=directory)
                continue
            os.chmod(entry, 0o700, dir_fd=directory)  # moving a directory writes its `..`
            os.rename(entry, next(names), src_dir_fd=directory, dst_dir_fd=top)
    finally:
        os.close(directory)


def _is_directory(name: str, directory: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
