"""The open block: whole lines are appended, and nothing else is ever seen behind a line feed.

After a failed write the file is cut back to its last whole line; should that fail too, it is left as it is, with a torn end, and
the next line begins a new block.
"""

from __future__ import annotations

import contextlib
import os
from io import FileIO
from pathlib import Path

from grpo_async.store.blocks import open_name


class LineFile:
    """One block of JSON lines.

    Args:
        first_seq: of the line that is to be the first; the file is named by it, and must not exist.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, first_seq: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / open_name(first_seq)
        # "x": should another writer have taken the name meanwhile, this fails instead of mixing two writers' lines
        self._file = FileIO(self.path, "xb", opener=_open_private)
        self.num_bytes = 0
        self.is_broken = False

    def write(self, line: bytes) -> None:
        """Append a line, with its line feed.

        Raises:
            OSError: it could not be written; nothing of it is left, or `is_broken` is set.
        """
        try:
            rest = memoryview(line)
            while rest:  # unbuffered: a write that fails leaves nothing behind that a later close would try again
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._cut_back()
            raise
        self.num_bytes += len(line)

    def close(self) -> None:
        """Close the file; one without a line is removed. Allowed more than once."""
        self._file.close()
        if self.num_bytes == 0:
            with contextlib.suppress(OSError):  # an empty block is no harm: the next writer removes it
                self.path.unlink(missing_ok=True)

    def _cut_back(self) -> None:
        try:
            self._file.truncate(self.num_bytes)
            self._file.seek(self.num_bytes)
        except OSError:
            self.is_broken = True


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
