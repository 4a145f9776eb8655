"""Windows of a timeline that may be hundreds of megabytes: start, end and place of every event in memory, the rest on disk.

Read on from where the last look ended. A file that was replaced (the older half of a timeline is deleted when it is full) is
read anew; a last line without a line feed waits until it has one.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from pathlib import Path
from typing import Any

from grpo_async.timeline import Event, parse_event
from grpo_async.viewer.timeline_data import drawing

_CHUNK_BYTES = 4 * 1024 * 1024
_MOST_EVENTS = 100_000  # of one window: more would take seconds to lay out


class EventIndex:
    """Over one events.jsonl, there or not yet. Safe in several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def window(self, start: float | None, end: float | None, *, columns: int) -> dict[str, Any]:
        """What static/timeline.js draws between `start` and `end` (unix seconds; None: open) on `columns` pixels, as
        `timeline_data.Drawing.as_dict` has it; also `num_left_out`: shorter events that did not fit.
        {"spans": None} without events.
        """
        with self._lock:  # waits: another reading of a file that is there
            self._read_on()
            if not self._starts:
                return {"spans": None}
            first, last = min(self._starts), max(self._ends)
            low = first if start is None else max(start, first)
            high = max(low, last if end is None else min(end, last))
            inside = [i for i in range(len(self._starts)) if self._ends[i] >= low and self._starts[i] <= high]
            chosen = inside
            if len(inside) > _MOST_EVENTS:
                chosen = sorted(heapq.nlargest(_MOST_EVENTS, inside, key=lambda i: self._ends[i] - self._starts[i]))
            events = self._events(chosen)
        drawn = drawing(events, start=low, end=high, columns=columns)
        found = {"start": low, "end": high, "spans": [], "num_merged": 0} if drawn is None else drawn.as_dict()
        return {**found, "first": first, "last": last, "num_left_out": len(inside) - len(chosen)}

    def _forget(self) -> None:
        self._starts, self._ends, self._offsets = array("d"), array("d"), array("q")
        self._read_until = 0
        self._identity: tuple[int, int] | None = None

    def _read_on(self) -> None:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return self._forget()
        with file:
            status = self._path.stat()
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._read_until:
                self._forget()
                self._identity = identity
            file.seek(self._read_until)
            rest = b""
            while chunk := file.read(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line, self._read_until)
                    self._read_until += len(line) + 1
        return None

    def _take(self, line: bytes, offset: int) -> None:
        event = parse_event(line + b"\n")
        if event is not None:
            self._starts.append(event.start)
            self._ends.append(event.end)
            self._offsets.append(offset)

    def _events(self, chosen: list[int]) -> list[Event]:
        events = []
        with self._path.open("rb") as file:
            for index in chosen:
                file.seek(self._offsets[index])
                event = parse_event(file.readline())
                if event is not None:  # the file was replaced since: the next look shows it anew
                    events.append(event)
        return events
