"""Notices that a run stands still: no step is finished and no token generated for too long.

The watch is a daemon thread of rank 0, so it goes on when the main thread hangs in a collective or the rollout thread in a user's
function. What follows from a stall is `trainer.stall`'s business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_LONGEST_INTERVAL_S = 5.0
_LOOKS_PER_TIMEOUT = 10


class Activity:
    """What the main thread is doing, for whoever watches it. Written by that thread, read by any."""

    def __init__(self) -> None:
        self._now = "starting", time.monotonic()
        self.num_begun = 0
        """Grows with every `begin`."""

    def begin(self, what: str) -> None:
        """From now on the main thread is `what` ("training step 3")."""
        self._now = what, time.monotonic()
        self.num_begun += 1

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Something in between; afterwards it is again what it was before, for as long as it was."""
        before = self._now
        self._now = what, time.monotonic()
        try:
            yield
        finally:
            self._now = before

    def __str__(self) -> str:
        what, since = self._now
        return f"{what}, for {time.monotonic() - since:.0f} s"


class StallWatchdog:
    """Calls `on_stall`, once, when `progress` has not changed for `timeout_s` seconds in which there was no excuse.

    Args:
        timeout_s: the longest time without progress.
        progress: anything that changes while the run goes on: finished steps, generated tokens.
        is_excused: whether nothing can be expected at the moment (a server is being restarted; that has a limit of its own).
        on_stall: called in the watchdog's thread with the seconds without progress.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        progress: Callable[[], object],
        is_excused: Callable[[], bool],
        on_stall: Callable[[float], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._interval_s = min(_LONGEST_INTERVAL_S, timeout_s / _LOOKS_PER_TIMEOUT)
        self._progress = progress
        self._is_excused = is_excused
        self._on_stall = on_stall
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """The run is over. Without effect on a stall that was noticed before: what was begun then is carried out."""
        self._ended.set()

    def _watch(self) -> None:
        seen: object = None
        changed_at = slept_at = time.monotonic()
        while not self._ended.wait(timeout=self._interval_s):  # until `stop`; a daemon thread
            was_frozen = time.monotonic() - slept_at > self._interval_s + self._timeout_s / 2  # SIGSTOP: it is no stall
            progress = self._look()
            now = slept_at = time.monotonic()
            if progress != seen or was_frozen or self._is_excused():
                seen, changed_at = progress, now
            elif now - changed_at >= self._timeout_s:
                self._on_stall(now - changed_at)
                return

    def _look(self) -> object:
        try:
            return self._progress()
        except Exception:  # the watch must not end with it: a counter that cannot be read does not move
            logger.exception("the progress of the run could not be read")
            return None
