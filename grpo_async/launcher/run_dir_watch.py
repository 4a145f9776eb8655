"""Notices that the run directory is gone: nobody finds what a run writes into a folder that was deleted or renamed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from grpo_async.utils.concurrency import in_thread

_INTERVAL_S = 2.0


class RunDirWatch:
    """`watch` sets `lost` when the directory is no longer where it was at the beginning."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._identity = self._identify()
        self.lost = asyncio.Event()

    @property
    def failure(self) -> str | None:
        """What happened, as a sentence; None: the directory is where it was. Checks now."""
        if self._is_there() and not self.lost.is_set():
            return None
        return f"the run directory {self._root} was deleted or renamed during the run"

    @property
    def is_free(self) -> bool:
        """Whether nothing else is there now."""
        return not os.path.lexists(self._root)

    async def watch(self) -> None:
        """Check now and then, in a thread: a file system that hangs must not hold up the launcher."""
        while not self.lost.is_set():
            await asyncio.sleep(_INTERVAL_S)  # back-off until the next look; cancelled with the run
            if not await asyncio.wrap_future(in_thread(self._is_there, name="run-dir-watch")):
                self.lost.set()

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
