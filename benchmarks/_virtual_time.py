"""An asyncio loop whose seconds pass only when nothing is left to do: hours are over in a second, the same each time.

One thread has both sides. The trainer's side is ordinary blocking code; where it would block, it lets the loop run:

    run_for(s)     the trainer computes for s seconds: the loop goes on meanwhile
    run_until_call the trainer waits: the loop goes on until somebody calls `give_back`
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class StandstillError(RuntimeError):
    """Nothing will ever happen again: everybody waits for somebody else."""


class _Selector(selectors.SelectSelector):
    """Never blocks: it moves the clock on to the next timer instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandstillError("no timer is set and nothing is ready")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's docstring. Not for sockets, threads or processes: they know nothing of its seconds."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        self._failure: Mapping[str, Any] | None = None
        self._is_asked_for = False
        super().__init__(self._virtual)
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual.now

    def run_for(self, seconds: float) -> None:
        """Let this many seconds pass. Raises: what a callback raised."""
        handle = self.call_later(seconds, self.stop)
        try:
            self._run()
        finally:
            handle.cancel()

    def run_until_call(self) -> None:
        """Go on until `give_back`. Raises: StandstillError; what a callback raised."""
        self._is_asked_for = True
        try:
            self._run()
        finally:
            self._is_asked_for = False

    def give_back(self) -> None:
        """Let `run_until_call` return after what is ready now; `run_for` goes on."""
        if self._is_asked_for:
            self.stop()

    def _run(self) -> None:
        self.run_forever()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure.get("exception") or RuntimeError(failure["message"])

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        self._failure = self._failure or context
        self.stop()
