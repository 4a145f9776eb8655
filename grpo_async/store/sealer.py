"""Seals full blocks during the run, and keeps the store to its size. One thread, which waits for a child process.

What it cannot seal stays as it is, and can be read as well; a warning says so. The block that is written is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.store.blocks import find_blocks, size_of
from grpo_async.store.metadata import MetadataFile

if TYPE_CHECKING:
    from grpo_async.config.record_sections import RolloutRecordSection

logger = logging.getLogger(__name__)

_BLOCKS_PER_CHILD = 16
_KILL_TIMEOUT_S = 10.0
SEAL_TIMEOUT_S = 300.0
"""A child that takes longer is ended: the disk hangs, or the machine is very busy."""


class Sealer:
    """See the module's docstring."""

    def __init__(self, folder: Path, settings: RolloutRecordSection, metadata: MetadataFile) -> None:
        self._folder = folder
        self._settings = settings
        self._metadata = metadata
        self._blocks: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None
        self._stopped = threading.Event()

    def add(self, path: Path) -> None:
        """Seal a block, after those that were added before. Returns at once."""
        self._blocks.put(path)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollout-sealer", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Let the thread end by itself when everything is sealed; a process that ends before leaves the rest as JSON lines."""
        self._blocks.put(None)

    def close(self, wait_s: float) -> None:
        """Wait until everything is sealed, `wait_s` seconds at most; then end the child. What is not sealed stays JSON lines."""
        if self._thread is None:
            return
        self._blocks.put(None)
        self._thread.join(timeout=wait_s)
        self._stopped.set()
        child = self._child
        if self._thread.is_alive() and child is not None:
            child.kill()
            self._thread.join(timeout=_KILL_TIMEOUT_S)

    def _work(self) -> None:
        while not self._stopped.is_set():
            blocks = self._take()
            if not blocks:
                return
            try:
                self._seal(blocks)
                self._make_room()
                self._metadata.save()
            except (OSError, subprocess.TimeoutExpired) as error:
                logger.warning("the rollout store cannot tidy up %s: %s", self._folder, error)

    def _take(self) -> list[Path]:
        """What is to be sealed by one child: starting it costs as much as a block. Empty: no more will come."""
        path = self._blocks.get()  # until the next full block, or close; a daemon thread
        found = []
        while path is not None:
            found.append(path)
            if len(found) == _BLOCKS_PER_CHILD or self._blocks.empty():
                return found
            path = self._blocks.get_nowait()
        if found:
            self._blocks.put(None)
        return found

    def _seal(self, blocks: Sequence[Path]) -> None:
        command = [sys.executable, "-m", "grpo_async.store.seal", str(os.getpid())]
        command += [str(self._settings.compression_level), str(self._folder.absolute())]
        names = [path.name for path in blocks]
        started = time.monotonic()
        # its own process group: Ctrl-C in the terminal is for the run, which ends its child itself
        child = subprocess.Popen(
            command + names,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._child = child
        try:
            _, message = child.communicate(timeout=SEAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate(timeout=_KILL_TIMEOUT_S)
            message = f"it took more than {SEAL_TIMEOUT_S:.0f} s"
        finally:
            self._child = None
        if child.returncode != 0 and not self._stopped.is_set():
            message = message.strip() or f"exit status {child.returncode}"
            logger.warning("rollouts in %s stay as JSON lines, which loses nothing: %s", self._folder, message)
        else:
            logger.debug("%s sealed in %.2f s", ", ".join(names), time.monotonic() - started)

    def _make_room(self) -> None:
        """Delete the oldest blocks until the store has no more than `max_gb`; the newest always stays."""
        limit = self._settings.max_gb * 1e9
        blocks = find_blocks(self._folder)
        sizes = [size_of(block.path) for block in blocks]
        total = sum(sizes)
        for block, size, following in zip(blocks, sizes, blocks[1:], strict=False):
            if total <= limit:
                return
            with contextlib.suppress(FileNotFoundError):
                block.path.unlink()
            total -= size
            logger.info("record.rollouts.max_gb: deleted the oldest block %s", block.path.name)
            with self._metadata.change() as now:
                now.deleted_blocks += 1
                now.deleted_until = following.first_seq
