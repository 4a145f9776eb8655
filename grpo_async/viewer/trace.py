"""What `grpo-async trace` makes of a timeline: a file for Perfetto (https://ui.perfetto.dev, which keeps it in the browser) or
Chrome's about:tracing, and a summary of who waited for whom.

Trace Event Format, JSON: a process for each group of tracks, a thread for each track, "X" spans in microseconds since the first
event, "i" instants, "C" counters, and arrows ("s" -> "t" -> "f"): a group from its last rollout over scoring and queue to the
step that trained it, and from a step to the push of its weights.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from grpo_async.errors import ConfigError
from grpo_async.tracking.timeline_file import ATTEMPT, Event
from grpo_async.utils.files import replacing
from grpo_async.utils.safe_text import visible_line
from grpo_async.utils.text import duration
from grpo_async.viewer.timeline import ORDER, Events, by_track, track_group, usage

PERFETTO = "https://ui.perfetto.dev"
_TITLES = {
    "weights": "weight push",
    "queue": "scored groups in the queue",
    "rollout": "rollouts",
    "server": "inference servers",
}
"""Of groups of tracks whose name alone says too little."""
_COUNTERS = {
    ("queue", "queued"): "queued groups",
    ("rollout", "generate"): "requests in flight",
    ("rollout", "rollout"): "rollouts in flight",
    ("trainer", "wait for samples"): "trainer waits",
}
"""Titles of the spans that are counted, by group of tracks and name."""

Record = dict[str, Any]
Thread = tuple[int, int]
"""Process and thread of a track in the trace."""


def write_trace(events: Sequence[Event], path: Path, *, title: str) -> int:
    """Write a trace to `path`, compressed where it ends in ".gz"; it is there when it is whole. Returns the number of its records.

    Raises:
        ConfigError: it cannot be written there.
    """
    records = trace_records(events, title=title)
    try:
        with replacing(path) as temporary, _open(temporary, is_compressed=path.suffix == ".gz") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, record in enumerate(records):
                file.write(("" if number == 0 else ",\n") + json.dumps(record, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --out") from error
    return len(records)


def _open(path: Path, *, is_compressed: bool) -> IO[str]:
    if is_compressed:
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=6)
    return path.open("w", encoding="utf-8")


def trace_records(events: Sequence[Event], *, title: str) -> list[Record]:
    """All records of a trace: those that name things first, the others by time, outer spans before what lies in them."""
    zero = min((event.start for event in events), default=0.0)
    tracks = by_track(events)
    groups = [*ORDER, *sorted(set(map(track_group, tracks)) - set(ORDER))]
    threads: dict[int, Thread] = {}  # of each event, by its identity
    metadata: list[Record] = []
    counts: dict[int, int] = {}

    def name(process: int, thread: int, kind: str, text: str, place: int) -> None:
        base = {"ph": "M", "pid": process, "tid": thread, "ts": 0}
        metadata.append({**base, "name": f"{kind}_name", "args": {"name": text}})
        metadata.append({**base, "name": f"{kind}_sort_index", "args": {"sort_index": place}})

    for track, spans in tracks.items():
        group = track_group(track)
        process = groups.index(group) + 1
        thread = counts[process] = counts.get(process, 0) + 1
        if thread == 1:
            name(process, 0, "process", f"{title}: {_TITLES.get(group, group)}", process)
        name(process, thread, "thread", track, thread)
        for event in spans:
            threads[id(event)] = process, thread
    timed = [_span(event, threads[id(event)], zero) for event in events]
    timed += _arrows(events, threads, zero)
    if counters := list(_counters(events, zero, process=len(groups) + 1)):
        name(len(groups) + 1, 0, "process", f"{title}: counters", 0)
    return metadata + sorted([*timed, *counters], key=lambda record: (record["ts"], -record.get("dur", 0)))


def _us(time_s: float, zero: float) -> int:
    """Whole microseconds: rounding keeps what lies inside inside."""
    return round((time_s - zero) * 1e6)


def _span(event: Event, thread: Thread, zero: float) -> Record:
    start, end = _us(event.start, zero), _us(event.end, zero)
    record: Record = {
        "name": event.name,
        "cat": track_group(event.track),
        "pid": thread[0],
        "tid": thread[1],
        "ts": start,
    }
    if event.end > event.start:
        record |= {"ph": "X", "dur": end - start}
    else:
        record |= {"ph": "i", "s": "g" if event.name == ATTEMPT else "t"}
    if event.details:
        record["args"] = event.details
    return record


def _arrows(events: Iterable[Event], threads: dict[int, Thread], zero: float) -> Iterator[Record]:
    last_rollout: dict[str, Event] = {}
    scores: dict[str, Event] = {}
    queued: list[Event] = []
    trained: dict[int, Event] = {}
    pushes: dict[int, Event] = {}
    for event in events:
        if event.end <= event.start:
            continue
        group, step = event.details.get("group"), event.details.get("step")
        match track_group(event.track), event.name:
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
        yield from _arrow("group", [event for event in found if event is not None], threads, zero, next(numbers))
    for step, train in trained.items():
        if step in pushes:
            yield from _arrow("weights", [train, pushes[step]], threads, zero, next(numbers))


def _arrow(name: str, stops: Sequence[Event], threads: dict[int, Thread], zero: float, number: int) -> Iterator[Record]:
    """It leaves the first span at its end, and reaches the others at their starts."""
    if len(stops) < 2:
        return
    at = 0
    for index, stop in enumerate(stops):
        start, end = _us(stop.start, zero), _us(stop.end, zero)
        at = max(start, end - 1) if index == 0 else max(at, start)
        process, thread = threads[id(stop)]
        record: Record = {"id": number, "name": name, "cat": "flow", "pid": process, "tid": thread, "ts": at}
        if index == len(stops) - 1:
            yield {**record, "ph": "f", "bp": "e"}
        else:
            yield {**record, "ph": "s" if index == 0 else "t"}


def _counters(events: Iterable[Event], zero: float, *, process: int) -> Iterator[Record]:
    edges: dict[str, list[tuple[int, int]]] = {title: [] for title in _COUNTERS.values()}
    for event in events:
        title = _COUNTERS.get((track_group(event.track), event.name))
        if title is not None and event.end > event.start:
            edges[title] += [(_us(event.start, zero), 1), (_us(event.end, zero), -1)]
    for title, changes in edges.items():
        value = 0
        for at, same in itertools.groupby(sorted(changes), key=lambda change: change[0]):
            change = sum(step for _, step in same)
            if change:
                value += change
                yield {"ph": "C", "pid": process, "tid": 0, "ts": at, "name": title, "args": {"value": value}}


# -- the summary

_MAX_NAMES = 12
_NAME_WIDTH = 34
_ALWAYS_BUSY = ("run", "server")


def summary(file: Events) -> str:
    """Who waited for whom and where the time went, in plain text, at most 79 wide."""
    found = usage(file.events)
    if found is None:
        return "the timeline has no span yet"
    steps = f"steps {min(file.steps)} to {max(file.steps)}" if file.steps else "no step yet"
    attempts = f", {file.num_attempts} attempts" if file.num_attempts > 1 else ""
    lines = [f"{len(file.events)} events over {duration(found.wall_s)}, {steps}{attempts}", "", "who waited for whom"]
    lines += [f"  {what:<50} {spent / found.wall_s:>4.0%}  {duration(spent):>8}" for what, spent in found.rows]
    lines.append(f"  {found.mean_in_flight:.1f} requests were at a server at once, on average")
    lines += ["", f"{'where the time went':<{_NAME_WIDTH}}{'count':>8}{'total':>11}{'mean':>11}{'longest':>11}"]
    names = [
        each
        for each in found.names
        if each.track not in _ALWAYS_BUSY and (each.track, each.name) != ("trainer", "step")
    ]
    for each in names[:_MAX_NAMES]:
        title = visible_line(f"{each.track}: {each.name}", _NAME_WIDTH - 3)
        times = "".join(f"{duration(value):>11}" for value in (each.total_s, each.mean_s, each.longest_s))
        lines.append(f"  {title:<{_NAME_WIDTH - 2}}{each.count:>8}{times}")
    return "\n".join([*lines, *(f"note: {note}" for note in file.notes)])
