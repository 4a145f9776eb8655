"""events.jsonl: who did what when. Any thread and any coroutine records; one thread writes, about once a second.

    {"name": "forward", "lane": "trainer", "start": 1700000000.25, "end": 1700000000.5, "details": {"rows": 4}}

Times are unix seconds; an instant has start = end. A lane is a row of a drawing. "rollout/3" is slot 3 of lane "rollout": what
runs at the same time has slots of its own (`Slots`), so within one lane spans only ever nest. Lanes: run, trainer, gpu, rollout,
scoring, queue, weights, checkpoint, evaluation, server.

Invariants: recording never waits, never raises, and holds at most `_MOST_PENDING` events; what does not fit is counted, and the
count is written. A line that ends in a line feed is whole: a write that breaks off is taken back, and a line that a kill has torn
is cut off by the next attempt, which goes on in the same file. Above `max_mb` the older half is dropped by one rename, and the new
first line says how much was.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

logger = logging.getLogger(__name__)

DROPPED = "older events dropped"
"""Name of the first line of a file whose older half was dropped; details: `bytes`, `events`, both over the whole run."""
LOST = "events lost"
"""Name of an instant; details: `events` that could not be written, or that came faster than they are written."""
ATTEMPT = "attempt"
"""Name of the instant with which each attempt of a run begins, and of the span that it leaves when it ends by itself."""

_INTERVAL_S = 1.0
_CLOSE_S = 5.0
_MOST_PENDING = 100_000
_BATCH = 5_000  # events made into text at once, so that the text stays small
_LONGEST_TEXT = 200  # of one detail: names of tools and errors may come from a model
_COPY_BYTES = 1 << 20
_ROOM_RETRY_S = 60.0  # after the older half could not be dropped: a try writes half the file


class TimelineSettings(Protocol):
    """Of `record.timeline`."""

    @property
    def enabled(self) -> bool: ...

    @property
    def max_mb(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `start` and `end` are unix seconds, equal for an instant."""

    name: str
    lane: str
    start: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end - self.start


class Span:
    """Records itself when its `with` block ends, also by an error, whose type is then the detail `error`."""

    __slots__ = ("_lane", "_name", "_timeline", "details", "start")

    def __init__(self, timeline: Timeline, name: str, lane: str, details: dict[str, Any]) -> None:
        self._timeline = timeline
        self._name = name
        self._lane = lane
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
        self._timeline.add(self._name, self._lane, self.start, time.time(), **self.details)


class Timeline:
    """See the module's docstring. Recording is safe from every thread.

    Args:
        path: events.jsonl; what is there is kept.
        settings: `max_mb` is the room for the file.
    """

    def __init__(self, path: Path, *, settings: TimelineSettings) -> None:
        self._events: deque[Event] = deque()
        self._num_lost = 0
        self._closing = threading.Event()
        self._file = _EventFile(path, max_bytes=settings.max_mb << 20)
        self._thread = threading.Thread(target=self._write_on, name="timeline", daemon=True)
        self._thread.start()

    def span(self, name: str, lane: str, **details: Any) -> Span:
        """`with timeline.span("forward", "trainer"): ...`. Details are numbers, strings, and lists of them."""
        return Span(self, name, lane, details)

    def add(self, name: str, lane: str, start: float, end: float, **details: Any) -> None:
        """A span that is over, in unix seconds (`time.time()`). One that ends before its start (the clock was set) has length 0."""
        if self._closing.is_set() or len(self._events) >= _MOST_PENDING:
            self._num_lost += 1
            return
        self._events.append(Event(name, lane, start, max(start, end), details))

    def instant(self, name: str, lane: str, **details: Any) -> None:
        """Something that happens now."""
        now = time.time()
        self.add(name, lane, now, now, **details)

    def slots(self, lane: str) -> Slots:
        """Rows of `lane` for what runs at the same time."""
        return Slots(self, lane)

    def close(self) -> None:
        """Write what there is; takes `_CLOSE_S` at most. Safe to call twice; what is recorded later is dropped."""
        self._closing.set()
        self._thread.join(timeout=_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the last events were not written to %s: the disk hangs", self._file.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_on(self) -> None:
        while not self._closing.wait(timeout=_INTERVAL_S):  # waits: close ends it, or the process
            self._write()
        self._write()
        self._file.close()

    def _write(self) -> None:
        while self._events:
            batch = [self._events.popleft() for _ in range(min(_BATCH, len(self._events)))]
            if self._num_lost:
                now = time.time()
                batch.append(Event(LOST, "run", now, now, {"events": self._num_lost}))
                self._num_lost = 0
            lost = self._file.append("".join(map(_line, batch)), len(batch))
            self._num_lost += lost
            if lost:
                return  # the disk is full, say: the next try is a second away


class Slots:
    """The rows of one lane: each of those that run at once has the lowest that is free. Safe from every thread."""

    def __init__(self, timeline: Timeline, lane: str) -> None:
        self._timeline = timeline
        self._lane = lane
        self._free: list[int] = []
        self._num = 0
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[tuple[Track, Span]]:
        """A span on a row of its own, and that row for what happens within it."""
        track = self.take()
        try:
            with track.span(name, **details) as span:
                yield track, span
        finally:
            self.release(track)

    def take(self) -> Track:
        """A row; give it back with `release`."""
        with self._lock:
            if self._free:
                slot = heapq.heappop(self._free)
            else:
                slot, self._num = self._num, self._num + 1
        return Track(self._timeline, f"{self._lane}/{slot}", slot)

    def release(self, track: Track) -> None:
        """Of `take`, once."""
        with self._lock:
            heapq.heappush(self._free, track.slot)


@dataclass(frozen=True, slots=True)
class Track:
    """One lane of a timeline, for those who need not know which."""

    timeline: Timeline
    lane: str
    slot: int = 0

    def span(self, name: str, **details: Any) -> Span:
        """See Timeline.span."""
        return self.timeline.span(name, self.lane, **details)

    def add(self, name: str, start: float, end: float, **details: Any) -> None:
        """See Timeline.add."""
        self.timeline.add(name, self.lane, start, end, **details)


class _NoTimeline(Timeline):
    def __init__(self) -> None:
        """Nothing is opened."""

    def add(self, name: str, lane: str, start: float, end: float, **details: Any) -> None:
        """Nothing is recorded."""

    def close(self) -> None:
        """There is nothing to write."""


NO_TIMELINE: Timeline = _NoTimeline()
"""Records nothing."""
NO_TRACK = Track(NO_TIMELINE, "")


def open_timeline(path: Path, settings: TimelineSettings) -> Timeline:
    """The recorder that `settings` ask for."""
    return Timeline(path, settings=settings) if settings.enabled else NO_TIMELINE


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file in the order in which they ended. A torn last line is left out, and so is a line that is no event.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            event = parse_event(line)
            if event is not None:
                yield event


def parse_event(line: bytes) -> Event | None:
    """None for a torn line and for what is no event."""
    if not line.endswith(b"\n"):
        return None
    try:
        content = json.loads(line)
        event = Event(
            str(content["name"]),
            str(content["lane"]),
            float(content["start"]),
            float(content["end"]),
            content["details"],
        )
    except (ValueError, KeyError, TypeError):
        return None
    # JSON may hold NaN and Infinity as Python reads it, and a comparison with NaN is false
    is_sound = 0.0 <= event.start <= event.end < 1e12 and isinstance(event.details, dict)
    return event if is_sound else None


def _line(event: Event) -> str:
    content = {
        "name": event.name,
        "lane": event.lane,
        "start": round(event.start, 6),
        "end": round(event.end, 6),
        "details": {name: _detail(value) for name, value in event.details.items()},
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def _detail(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else value[: _LONGEST_TEXT - 1] + "…"
    if isinstance(value, list | tuple):
        return [_detail(each) for each in value]
    if isinstance(value, float):
        return round(value, 6) if -1e300 < value < 1e300 else None  # JSON has no NaN
    return value if isinstance(value, int | None) else _detail(str(value))


class _EventFile:
    """The file, in the writing thread. A failure is said once, until a write succeeds again."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._size = 0
        self._is_failing = False
        self._makes_room_at = 0.0  # not before; by time.monotonic()

    def append(self, text: str, num_events: int) -> int:
        """Write whole lines; returns how many events were lost: none or all."""
        data = text.encode()
        try:
            if self._descriptor is None:
                self._open()
            if self._size + len(data) > self._max_bytes:
                if time.monotonic() < self._makes_room_at:
                    return num_events
                self._drop_older_half()
            self._write(data)
        except OSError as error:
            self.close()
            if not self._is_failing:
                self._is_failing = True
                logger.warning(
                    "cannot write the timeline %s: %s; the run goes on without it", self.path, error.strerror
                )
            return num_events
        if self._is_failing:
            self._is_failing = False
            logger.warning("the timeline %s can be written again", self.path)
        return 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = _whole_bytes(self._descriptor)
        os.ftruncate(self._descriptor, self._size)  # a line that a kill has torn

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def _drop_older_half(self) -> None:
        """Begin the file anew with its newer half."""
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            self._copy_newer_half(temporary)
            os.replace(temporary, self.path)
        except OSError:
            self._makes_room_at = time.monotonic() + _ROOM_RETRY_S
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._open()
        logger.info("the older half of %s was dropped: record.timeline.max_mb", self.path)

    def _copy_newer_half(self, temporary: Path) -> None:
        with self.path.open("rb") as source, temporary.open("wb") as target:
            first = parse_event(source.readline())
            before = first.details if first is not None and first.name == DROPPED else {}
            source.seek(max(0, self._size // 2 - 1))
            source.readline()
            cut = source.tell()  # the first line that stays
            num_events = _count_lines(source, cut)
            source.seek(max(0, cut - _COPY_BYTES))
            last = parse_event(b"".join(source.read(cut - source.tell()).splitlines(keepends=True)[-1:]))
            since = time.time() if last is None else last.end
            details = {
                "bytes": cut + int(before.get("bytes", 0)),
                "events": num_events + int(before.get("events", 0)) - bool(before),  # the mark itself is none
            }
            target.write(_line(Event(DROPPED, "run", since, since, details)).encode())
            source.seek(cut)
            while chunk := source.read(_COPY_BYTES):
                target.write(chunk)


def _count_lines(source: BinaryIO, end: int) -> int:
    """Line feeds before `end`."""
    source.seek(0)
    num = 0
    while chunk := source.read(min(_COPY_BYTES, end - source.tell())):
        num += chunk.count(b"\n")
    return num


def _whole_bytes(descriptor: int) -> int:
    """Size of the file without its torn last line."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    position = end
    while position > 0:
        begin = max(0, position - _COPY_BYTES)
        found = os.pread(descriptor, position - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        position = begin
    return 0
