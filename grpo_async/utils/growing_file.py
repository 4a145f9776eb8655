"""Reads on in a file that another process adds lines to, cuts, or replaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

_CHUNK_BYTES = 4 * 1024 * 1024


class GrowingFile:
    """The whole lines of a file, each once. A last line without a line feed waits until it has one. Not safe in several threads.

    A file that became shorter, that was put in the place of another (a resume cuts metrics.jsonl so; the older half of a full
    timeline is deleted so) or that is gone is another file: `forget` is called, and its lines come from the first on.
    """

    def __init__(self, path: Path, forget: Callable[[], None]) -> None:
        self._path = path
        self._forget = forget
        self._identity: tuple[int, int] | None = None
        self._read_until = 0

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """What was added since the last time: (place of its first byte, line without its line feed). Take all of them."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._start_over(None)
            return
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._read_until:
                self._start_over(identity)
            file.seek(self._read_until)
            rest = b""
            while chunk := file.read(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    offset = self._read_until
                    self._read_until += len(line) + 1
                    yield offset, line

    def _start_over(self, identity: tuple[int, int] | None) -> None:
        if self._identity is not None or self._read_until:
            self._forget()
        self._identity, self._read_until = identity, 0
