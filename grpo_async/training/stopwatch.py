"""What the seconds of one thread went into, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by what was done in them. What is done inside something else is not counted there.

    Worked example: 5 s of waiting, in the middle of which 2 s go into a push -> {"waiting": 3.0, "pushing": 2.0}.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._running: list[str] = []  # the innermost last
        self._counted_until = clock()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Count the block as `what`."""
        self._count()
        self._running.append(what)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by what was done in them; those in which nothing was named are missing."""
        self._count()
        spent, self._spent = self._spent, {}
        return spent

    def _count(self) -> None:
        now = self._clock()
        if self._running:
            what = self._running[-1]
            self._spent[what] = self._spent.get(what, 0.0) + now - self._counted_until
        self._counted_until = now
