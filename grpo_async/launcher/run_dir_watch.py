"""Notices that the run directory is gone: what a run writes into a folder that was deleted or renamed reaches nobody."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Self

_INTERVAL_S = 2.0


class RunDirWatch:
    """Checks now and then, in a thread: a file system that hangs must not hold up the launcher. An async context manager."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.lost = asyncio.Event()
        self._ended = threading.Event()

    async def __aenter__(self) -> Self:
        self._identity = self._identify()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="run-dir-watch", daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def failure(self) -> str | None:
        """What happened, as a sentence; None: the directory is where it was. Checks now."""
        if self._is_there() and not self.lost.is_set():
            return None
        return f"the run directory {self._root} was deleted or renamed during the run"

    @property
    def is_free(self) -> bool:
        """Whether nobody has put anything else there."""
        return not os.path.lexists(self._root)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._ended.wait(timeout=_INTERVAL_S):  # leaving the context ends it; a daemon thread
            if not self._is_there():
                loop.call_soon_threadsafe(self.lost.set)
                return

    def _is_there(self) -> bool:
        try:
            return self._identify() == self._identity
        except FileNotFoundError:
            return False
        except OSError:  # a file system that cannot be reached for a while
            return True

    def _identify(self) -> tuple[int, int]:
        found = os.stat(self._root)
        return found.st_dev, found.st_ino
