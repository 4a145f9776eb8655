"""Records what happened when. Any thread and any coroutine records; one thread writes, about once a second.

Times are unix seconds; an instant has start = end. A track is a row of a drawing. What runs at the same time on a track has a slot
each (`Slots`), which is a row of its own: "rollout/3" is slot 3 of the track "rollout". So within one row spans only ever nest. The
tracks are in `events.EVENTS`.

Invariant: recording never waits, never raises, and holds at most `_MAX_PENDING` events, including those that wait while the disk
is full; what does not fit is counted, and the count is written. The file itself: timeline_file.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpo_async.tracking.timeline_file import LOST, Event, EventWriter, event_line

logger = logging.getLogger(__name__)

SHORTEST_WAIT_S = 0.001
"""Shorter waits are left out of the timeline: every request and every group has one."""
_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
_MAX_PENDING = 100_000
_BATCH = 5_000  # events made into text at once, so that the text stays small


class Span:
    """Records itself when its `with` block ends, also by an error, whose type is then the detail `error`."""

    __slots__ = ("_name", "_timeline", "_track", "details", "start")

    def __init__(self, timeline: Timeline, name: str, track: str, details: dict[str, Any]) -> None:
        self._timeline = timeline
        self._name = name
        self._track = track
        self.details = details
        """May be added to until the block ends."""
        self.start = 0.0

    def __enter__(self) -> Self:
        self.start = time.time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.details["error"] = kind.__name__
        self._timeline.add(self._name, self._track, self.start, time.time(), **self.details)


class Timeline:
    """See the module's docstring. Recording is safe from every thread.

    Args:
        path: events.jsonl; what is there is kept.
        max_mb: the largest size of the file.
    """

    def __init__(self, path: Path, *, max_mb: int = 256) -> None:
        self._events: deque[Event] = deque()
        self._num_lost = 0
        self._lost_lock = threading.Lock()  # held for a few instructions only
        self._closing = threading.Event()
        self._file = EventWriter(path, max_bytes=max_mb << 20)
        self._thread = threading.Thread(target=self._write_on, name="timeline", daemon=True)
        self._thread.start()

    def span(self, name: str, track: str, **details: Any) -> Span:
        """`with timeline.span("forward", "trainer"): ...`. Details are numbers, strings, and lists of them."""
        return Span(self, name, track, details)

    def add(self, name: str, track: str, start: float, end: float, **details: Any) -> None:
        """A span that is over, in unix seconds (`time.time()`). One that ends before its start (the clock was set) has length 0."""
        if self._closing.is_set() or len(self._events) >= _MAX_PENDING:
            with self._lost_lock:
                self._num_lost += 1
            return
        self._events.append(Event(name, track, start, max(start, end), details))

    def instant(self, name: str, track: str, **details: Any) -> None:
        """Something that happens now."""
        now = time.time()
        self.add(name, track, now, now, **details)

    def slots(self, track: str) -> Slots:
        """Slots of `track` for what runs at the same time."""
        return Slots(self, track)

    def close(self) -> None:
        """Write what there is; takes `_CLOSE_TIMEOUT_S` at most. Safe to call twice; what is recorded later is dropped."""
        self._closing.set()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the last events were not written to %s: the disk hangs", self._file.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_on(self) -> None:
        while not self._closing.wait(timeout=_INTERVAL_S):  # close ends it, or the process
            self._write()
        self._write()
        self._file.close()

    def _write(self) -> None:
        while self._events or self._num_lost:
            batch = [self._events.popleft() for _ in range(min(_BATCH, len(self._events)))]
            with self._lost_lock:
                num_lost, self._num_lost = self._num_lost, 0
            if num_lost:
                now = time.time()
                batch.append(Event(LOST, "run", now, now, {"events": num_lost}))
            if not self._file.append("".join(map(event_line, batch))):
                self._events.extendleft(reversed(batch))  # the disk is full, say: the next try is a second away
                return


class Slots:
    """The slots of one track: what runs at the same time has a slot each, the lowest that is free. Safe from every thread."""

    def __init__(self, timeline: Timeline, track: str) -> None:
        self._timeline = timeline
        self._track = track
        self._free: list[int] = []
        self._num = 0
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[tuple[Track, Span]]:
        """A span on a slot of its own, and that slot for what happens within it."""
        track = self.take()
        try:
            with track.span(name, **details) as span:
                yield track, span
        finally:
            self.release(track)

    def take(self) -> Track:
        """A free slot; give it back with `release`."""
        with self._lock:
            if self._free:
                slot = heapq.heappop(self._free)
            else:
                slot, self._num = self._num, self._num + 1
        return Track(self._timeline, f"{self._track}/{slot}", slot)

    def release(self, track: Track) -> None:
        """Give back a slot that `take` returned, once."""
        with self._lock:
            heapq.heappush(self._free, track.slot)


@dataclass(frozen=True, slots=True)
class Track:
    """Records on one track of a timeline, or on one slot of it."""

    timeline: Timeline
    name: str
    slot: int = 0

    def span(self, name: str, **details: Any) -> Span:
        """See Timeline.span."""
        return self.timeline.span(name, self.name, **details)

    def add(self, name: str, start: float, end: float, **details: Any) -> None:
        """See Timeline.add."""
        self.timeline.add(name, self.name, start, end, **details)


class _NoTimeline(Timeline):
    def __init__(self) -> None:
        """Nothing is opened."""

    def add(self, name: str, track: str, start: float, end: float, **details: Any) -> None:
        """Nothing is recorded."""

    def close(self) -> None:
        """There is nothing to write."""


NO_TIMELINE: Timeline = _NoTimeline()
"""Records nothing."""
NO_TRACK = Track(NO_TIMELINE, "")
