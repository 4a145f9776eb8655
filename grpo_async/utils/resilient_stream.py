"""A text stream that outlives its reader: `train | tee log` continues when tee has died, and so does a run without its terminal."""

from __future__ import annotations

import atexit
import errno
import io
import math
import os
from collections.abc import Callable
from typing import Any, TextIO

MAX_PRINTED_CHARS = 16 * 2**20
"""Maximum of what rewards, tools and environments print into the log of a process; our own log goes to standard error."""
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
"""A file on a full disk: what cannot be written is lost, and the next line is tried."""


def escape_unencodable(stream: TextIO) -> None:
    """From now on `stream` writes a character that its encoding lacks, or half of one, as an escape instead of raising."""
    if isinstance(stream, io.TextIOWrapper):  # an io.StringIO takes every character
        stream.reconfigure(errors="backslashreplace")


class ResilientStream:
    """A wrapper of `stream` whose writes do not raise. After the first that fails for good, all that follows is dropped.

    Args:
        name: of the stream, for `on_lost`.
        on_lost: called once with a sentence.
        max_chars: from the first write that would go beyond, all is dropped; a last line says so.
    """

    def __init__(
        self, stream: TextIO, name: str, on_lost: Callable[[str], None], *, max_chars: float = math.inf
    ) -> None:
        escape_unencodable(stream)
        self._stream = stream
        self._name = name
        self._on_lost = on_lost
        self._is_told = False
        self._max_chars = max_chars
        self._num_chars = 0
        self._is_full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        length = len(text)
        if self._is_full:
            return length
        self._num_chars += length
        if self._num_chars > self._max_chars:
            self._is_full = True
            text = f"\n[grpo-async: what is printed beyond {self._max_chars:,} characters is dropped]\n"
        try:
            self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return length

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush only: user code that closes `sys.stdout` must not end the prints of all other code."""
        self.flush()

    def _give_up(self, error: OSError) -> None:
        if error.errno not in _MAY_PASS:
            self._detach()
        if not self._is_told:
            self._is_told = True
            atexit.register(self._end)
            self._on_lost(f"{self._name} can no longer be written ({error.strerror}); the run continues, see its logs")

    def _end(self) -> None:
        """Write what is still buffered, or drop it: if the interpreter failed to, it would end with its own exit code."""
        try:
            self._stream.flush()
        except OSError:
            self._detach()

    def _detach(self) -> None:
        """Redirect it to /dev/null: what is still buffered goes there, and so does the interpreter's last flush."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, self._stream.fileno())
        finally:
            os.close(nothing)
