"""Whether a store has a writer that lives: writer.lock is locked by it, and the kernel unlocks it when a process ends, however.

The writer shares the lock and a reader asks for it alone, for a moment: neither keeps the other waiting for longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_NAME = "writer.lock"


class WriterLock:
    """Held from construction to `release`. On a file system without locks it does nothing.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # a reader that looks holds it for a moment

    def release(self) -> None:
        os.close(self._descriptor)


def has_writer(folder: Path) -> bool:
    """Whether some process writes to the store now. True as well where that cannot be told."""
    try:
        descriptor = os.open(folder / _NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
