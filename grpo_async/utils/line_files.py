"""Files of lines that are whole as soon as their line feed is there, so that readers may look while a process appends.

What a full disk does is said in one way (`Outage`), and costs what the file is worth: metrics wait in memory for a minute and
rollouts for ten seconds, because their queue is bounded; then the run ends. The timeline only helps: events that memory does not
hold are lost, and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from grpo_async.errors import RunError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20


def whole_bytes(descriptor: int) -> int:
    """Size of the file without its last line, where that has no line feed: torn by a kill, or being written."""
    position = os.lseek(descriptor, 0, os.SEEK_END)
    while position > 0:
        begin = max(0, position - _CHUNK_BYTES)
        found = os.pread(descriptor, position - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        position = begin
    return 0


def append_whole(descriptor: int, lines: bytes) -> None:
    """Append lines to a file that is opened for appending; no reader ever sees half of one that could not be written.

    Raises:
        OSError: they could not be written. Nothing of them is left, unless the file cannot be cut back either.
    """
    size, rest = os.fstat(descriptor).st_size, memoryview(lines)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


class Outage:
    """The time in which nothing can be written to `path`: logged as it begins and as it ends.

    Args:
        meanwhile, afterward: what becomes of what is to be written, and what became of it.
    """

    def __init__(self, path: Path, *, meanwhile: str, afterward: str = "nothing is missing") -> None:
        self._path = path
        self._meanwhile = meanwhile
        self._afterward = afterward
        self._since: float | None = None

    def lasts(self, error: OSError) -> float:
        """A write has failed. Seconds since the first that did."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            logger.warning("cannot write %s: %s; %s", self._path, error.strerror, self._meanwhile)
        return now - self._since

    def end(self) -> None:
        """A write has succeeded."""
        if self._since is not None:
            self._since = None
            logger.warning("%s can be written again; %s", self._path, self._afterward)


class Writer(ABC):
    """A writer as a context: leaving it closes it. What cannot be written then is raised; where another error ends the run it is
    logged instead, because the user has to know the other one first."""

    @abstractmethod
    def close(self) -> None:
        """Write what waits. Raises RunError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RunError as own:
            if error is None:
                raise
            logger.error("%s", own)
