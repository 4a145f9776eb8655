"""Metrics and timeline of a run, read on while the run writes them."""

from __future__ import annotations

import heapq
import threading
from array import array
from pathlib import Path
from typing import Any

from grpo_async.findings.evidence import PackedRow, Row, new_metrics
from grpo_async.tracking.timeline_file import Event, parse_event
from grpo_async.utils.growing_file import GrowingFile
from grpo_async.viewer.timeline import drawing, usage

_MAX_EVENTS = 100_000  # of one window: more would take seconds to lay out


class MetricLog:
    """metrics.jsonl. Safe in several threads.

    A step that occurs twice (the run went on from an earlier checkpoint) counts as it was written last.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, Row] = {}
        self._known: dict[tuple[str, ...], dict[str, int]] = {}
        self._file = GrowingFile(path, self._rows.clear)

    def rows(self) -> dict[int, Row]:
        """The finite numbers of each step, ascending by step."""
        with self._lock:
            for row in new_metrics(self._file):
                step = int(row["step"])
                while self._rows and next(reversed(self._rows)) > step:
                    self._rows.popitem()  # a step of a branch that was left
                self._rows[step] = PackedRow(row, self._known)
            return dict(self._rows)


class EventIndex:
    """events.jsonl, there or not yet, which may be hundreds of megabytes: start, end and place of every event in memory, the rest
    on disk. Safe in several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GrowingFile(path, self._forget)
        self._lock = threading.Lock()
        self._forget()

    def window(self, start: float | None, end: float | None, *, columns: int) -> dict[str, Any]:
        """What static/timeline.js draws between `start` and `end` (unix seconds; None: open) on `columns` pixels, as
        `timeline.drawing` has it; also `num_left_out`: shorter events that did not fit. {"spans": None} without events."""
        with self._lock:
            self._read_on()
            if not self._starts:
                return {"spans": None}
            first, last = min(self._starts), max(self._ends)
            low, high, inside = self._inside(start, end)
            chosen = inside
            if len(inside) > _MAX_EVENTS:
                chosen = sorted(heapq.nlargest(_MAX_EVENTS, inside, key=lambda i: self._ends[i] - self._starts[i]))
            events = self._events(chosen)
        nothing = {"start": low, "end": high, "spans": [], "num_merged": 0, "titles": {}}
        found = drawing(events, start=low, end=high, columns=columns) or nothing
        return {**found, "first": first, "last": last, "num_left_out": len(inside) - len(chosen)}

    def usage(self, start: float | None, end: float | None) -> dict[str, Any]:
        """Who waited for whom in a window: `wall_s`, `rows` and `waits` of `timeline.Usage`; {"wall_s": None} without a span in it,
        {"wall_s": None, "num_events": n} where it has more than can be looked at."""
        with self._lock:
            self._read_on()
            if not self._starts:
                return {"wall_s": None}
            low, high, inside = self._inside(start, end)
            if len(inside) > _MAX_EVENTS:
                return {"wall_s": None, "num_events": len(inside)}
            events = self._events(inside)
        cut = [Event(e.name, e.track, max(e.start, low), min(e.end, high), e.details) for e in events]
        found = usage([event for event in cut if event.end > event.start])
        if found is None:
            return {"wall_s": None}
        return {"wall_s": found.wall_s, "rows": found.rows, "waits": found.waits}

    def _inside(self, start: float | None, end: float | None) -> tuple[float, float, list[int]]:
        """The window, within the timeline, and the places of the events that touch it."""
        first, last = min(self._starts), max(self._ends)
        low = first if start is None else min(max(start, first), last)
        high = max(low, last if end is None else min(end, last))
        return low, high, [i for i in range(len(self._starts)) if self._ends[i] >= low and self._starts[i] <= high]

    def _forget(self) -> None:
        self._starts, self._ends, self._offsets = array("d"), array("d"), array("q")

    def _read_on(self) -> None:
        for offset, line in self._file.new_lines():
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
                if event is not None:  # else the file was replaced since: the next request shows it
                    events.append(event)
        return events
