"""Notices that the run directory is gone: nobody finds what a run writes into a folder that was deleted or renamed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from grpo_async.run_directory import attempt_config
from grpo_async.utils.concurrency import in_thread

_INTERVAL_S = 2.0


class RunDirWatch:
    """`watch` sets `lost` when a file that nobody replaces, the attempt's config.yaml, is no longer where it was. (The directory
    itself may survive `rm -rf`, by a file that is written meanwhile, or be another one of that name.)"""

    def __init__(self, root: Path, attempt: Path) -> None:
        self._root = root
        self._file = attempt_config(attempt)
        self._descriptor = os.open(self._file, os.O_RDONLY)  # open, so that no other file can get its inode
        self.lost = asyncio.Event()

    @property
    def failure(self) -> str | None:
        """What happened and what to do; None: the directory is where it was. Checks now."""
        if not self.lost.is_set() and self._is_there():
            return None
        return (
            f"the run directory {self._root} was deleted or renamed during the run; rename it back and continue with --resume, "
            "or begin again"
        )

    async def watch(self) -> None:
        """Check now and then, in a thread: a file system that hangs must not hold up the launcher."""
        try:
            while not self.lost.is_set():
                await asyncio.sleep(_INTERVAL_S)  # back-off until the next look; cancelled with the run
                if not await asyncio.wrap_future(in_thread(self._is_there, name="run-dir-watch")):
                    self.lost.set()
        finally:
            os.close(self._descriptor)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._file), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that cannot be reached for a while
            return True
