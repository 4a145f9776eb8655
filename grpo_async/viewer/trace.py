"""A timeline as a trace for Perfetto (https://ui.perfetto.dev, which keeps it in the browser) and Chrome's about:tracing.

Trace Event Format, JSON: a process for each group of lanes, a thread for each lane, "X" spans in microseconds since the first
event, "i" instants, "C" counters, and arrows ("s" -> "t" -> "f"): a group from its last rollout over scoring and queue to the
step that trained it, and from a step to the push of its weights.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from grpo_async.errors import ConfigError
from grpo_async.tracking.timeline_file import ATTEMPT, Event
from grpo_async.viewer.timeline_data import ORDER, TITLES, lane_group, lay_out

PERFETTO = "https://ui.perfetto.dev"
_COUNTERS = (
    ("queued groups", "queue", "queued"),
    ("requests in flight", "rollout", "generate"),
    ("rollouts in flight", "rollout", "rollout"),
    ("trainer waits", "trainer", "wait for samples"),
)
"""Title, group of lanes and name of the spans that are counted."""

Record = dict[str, Any]
Place = tuple[int, int]


def write_trace(events: Sequence[Event], path: Path, *, title: str) -> int:
    """Write a trace to `path`, compressed where it ends in ".gz"; it is there when it is whole. Returns the number of its records.

    Raises:
        ConfigError: it cannot be written there.
    """
    records = trace_records(events, title=title)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with _open(temporary, is_compressed=path.suffix == ".gz") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, record in enumerate(records):
                file.write(("" if number == 0 else ",\n") + json.dumps(record, separators=(",", ":")))
            file.write("\n]}\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --out") from error
    return len(records)


def _open(path: Path, *, is_compressed: bool) -> IO[str]:
    if is_compressed:
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=6)
    return path.open("w", encoding="utf-8")


def trace_records(events: Sequence[Event], *, title: str) -> list[Record]:
    """All records of a trace: those that name things first, the others by time, outer spans before what lies in them."""
    zero = min((event.start for event in events), default=0.0)
    rows = lay_out(events)
    groups = [*ORDER, *sorted({lane_group(row.lane) for row in rows} - set(ORDER))]
    places: dict[int, Place] = {}  # of each event, by its identity
    metadata: list[Record] = []
    counts: dict[int, int] = {}
    for row in rows:
        group = lane_group(row.lane)
        process = groups.index(group) + 1
        thread = counts[process] = counts.get(process, 0) + 1
        if thread == 1:
            name = f"{title}: {TITLES.get(group, group)}"
            metadata.append(_name(process, 0, "process_name", name=name))
            metadata.append(_name(process, 0, "process_sort_index", sort_index=process))
        metadata.append(_name(process, thread, "thread_name", name=row.lane))
        metadata.append(_name(process, thread, "thread_sort_index", sort_index=thread))
        for placed in row.spans:
            places[id(placed.event)] = process, thread
    timed = [_span(event, places[id(event)], zero) for event in events]
    timed += _arrows(events, places, zero)
    counters = list(_counters(events, zero, process=len(groups) + 1))
    if counters:
        metadata.append(_name(len(groups) + 1, 0, "process_name", name=f"{title}: counters"))
        metadata.append(_name(len(groups) + 1, 0, "process_sort_index", sort_index=0))
    timed += counters
    return metadata + sorted(timed, key=lambda record: (record["ts"], -record.get("dur", 0)))


def _name(process: int, thread: int, kind: str, **arguments: str | int) -> Record:
    return {"ph": "M", "pid": process, "tid": thread, "ts": 0, "name": kind, "args": arguments}


def _us(time_s: float, zero: float) -> int:
    """Whole microseconds: rounding keeps what lies inside inside."""
    return round((time_s - zero) * 1e6)


def _span(event: Event, place: Place, zero: float) -> Record:
    start, end = _us(event.start, zero), _us(event.end, zero)
    record: Record = {"name": event.name, "cat": lane_group(event.lane), "pid": place[0], "tid": place[1], "ts": start}
    if event.end > event.start:
        record |= {"ph": "X", "dur": end - start}
    else:
        record |= {"ph": "i", "s": "g" if event.name == ATTEMPT else "t"}
    if event.details:
        record["args"] = event.details
    return record


def _arrows(events: Iterable[Event], places: dict[int, Place], zero: float) -> Iterator[Record]:
    last_rollout: dict[str, Event] = {}
    scores: dict[str, Event] = {}
    queued: list[Event] = []
    trained: dict[int, Event] = {}
    pushes: dict[int, Event] = {}
    for event in events:
        if event.end <= event.start:
            continue
        group, step = event.details.get("group"), event.details.get("step")
        match lane_group(event.lane), event.name:
            case "rollout", "rollout" if isinstance(group, str):
                before = last_rollout.get(group)
                if before is None or event.end > before.end:
                    last_rollout[group] = event
            case "rollout", "rollout function":
                last_rollout |= {str(name): event for name in event.details.get("groups", ())}
            case "scoring", "score" if isinstance(group, str):
                scores[group] = event
            case "queue", "queued":
                queued.append(event)
            case "trainer", "train" if isinstance(step, int):
                trained[step] = event
            case "weights", "push" if isinstance(version := event.details.get("version"), int):
                pushes[version] = event
    numbers = itertools.count(1)
    for wait in queued:
        group = str(wait.details.get("group"))
        found = [last_rollout.get(group), scores.get(group), wait, trained.get(wait.details.get("step", -1))]
        yield from _arrow("group", [event for event in found if event is not None], places, zero, next(numbers))
    for step, train in trained.items():
        push = pushes.get(step)
        if push is not None:
            yield from _arrow("weights", [train, push], places, zero, next(numbers))


def _arrow(name: str, stops: Sequence[Event], places: dict[int, Place], zero: float, number: int) -> Iterator[Record]:
    """It leaves the first span at its end, and reaches the others at their starts."""
    if len(stops) < 2:
        return
    at = 0
    for index, stop in enumerate(stops):
        start, end = _us(stop.start, zero), _us(stop.end, zero)
        at = max(start, end - 1) if index == 0 else max(at, start)
        process, thread = places[id(stop)]
        kind = "s" if index == 0 else "f" if index == len(stops) - 1 else "t"
        record: Record = {
            "ph": kind,
            "id": number,
            "name": name,
            "cat": "flow",
            "pid": process,
            "tid": thread,
            "ts": at,
        }
        yield {**record, "bp": "e"} if kind == "f" else record


def _counters(events: Iterable[Event], zero: float, *, process: int) -> Iterator[Record]:
    edges: dict[str, list[tuple[int, int]]] = {title: [] for title, _, _ in _COUNTERS}
    titles = {(group, name): title for title, group, name in _COUNTERS}
    for event in events:
        title = titles.get((lane_group(event.lane), event.name))
        if title is not None and event.end > event.start:
            edges[title] += [(_us(event.start, zero), 1), (_us(event.end, zero), -1)]
    for title, changes in edges.items():
        value = 0
        for at, same in itertools.groupby(sorted(changes), key=lambda change: change[0]):
            change = sum(step for _, step in same)
            if change:
                value += change
                yield {"ph": "C", "pid": process, "tid": 0, "ts": at, "name": title, "args": {"value": value}}
