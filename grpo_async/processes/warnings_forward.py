"""Warnings of the trainer's log are sent to the launcher, too, which shows the latest: nobody reads a log while a run goes well."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FREE = 3
_INTERVAL_S = 60.0
_MAX_LINES = 3
_MAX_CHARS = 1000


class WarningForwarder(logging.Handler):
    """Hands on what this package warns of. Of one kind (one line of code) the first three, then one a minute.

    Args:
        tell: gets the text, without a traceback; from any thread; must be quick.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._clock = clock
        self._kinds: dict[tuple[str, int], tuple[int, float]] = {}
        self._kinds_lock = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        kind, now = (record.pathname, record.lineno), self._clock()
        with self._kinds_lock:
            count, told_at = self._kinds.get(kind, (0, now))
            if count >= _FREE and now - told_at < _INTERVAL_S:
                return
            self._kinds[kind] = (count + 1, now)
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - as logging itself does: a wrong log call must not end what it is about
            self.handleError(record)
            return
        self._tell(_in_short(text))


def _in_short(text: str) -> str:
    """A text of many lines (a traceback in it) as its first and its last one, which say the most."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > _MAX_LINES:
        text = f"{lines[0]} ... {lines[-1].strip()}"
    return text[:_MAX_CHARS]


@contextmanager
def forwarding_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """While open, warnings and errors of this package's loggers go to `tell`, too."""
    handler = WarningForwarder(tell)
    ours = logging.getLogger("grpo_async")
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
