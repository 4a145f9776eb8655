"""What `grpo-async trace` makes of a timeline: a file for Perfetto (https://ui.perfetto.dev, which keeps it in the browser) or
Chrome's about:tracing, and a summary of who waited for whom.

Trace Event Format, JSON: a process for each group of tracks, a thread for each track, "X" spans in microseconds since the first
event, "i" instants.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from grpo_async.errors import ConfigError
from grpo_async.tracking.timeline_file import ATTEMPT, Event
from grpo_async.utils.files import replacing
from grpo_async.utils.text import count, duration
from grpo_async.viewer.timeline import ORDER, Events, by_track, track_group, usage

PERFETTO = "https://ui.perfetto.dev"
_TITLES = {
    "weights": "weight push",
    "queue": "scored groups in the queue",
    "rollout": "rollouts",
    "server": "inference servers",
}
"""Titles of groups of tracks whose name alone says too little."""
Record = dict[str, Any]


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
    metadata: list[Record] = []
    timed: list[Record] = []
    counts: dict[int, int] = {}

    def name(process: int, thread: int, kind: str, text: str, index: int) -> None:
        base = {"ph": "M", "pid": process, "tid": thread, "ts": 0}
        metadata.append({**base, "name": f"{kind}_name", "args": {"name": text}})
        metadata.append({**base, "name": f"{kind}_sort_index", "args": {"sort_index": index}})

    for track, spans in tracks.items():
        group = track_group(track)
        process = groups.index(group) + 1
        thread = counts[process] = counts.get(process, 0) + 1
        if thread == 1:
            name(process, 0, "process", f"{title}: {_TITLES.get(group, group)}", process)
        name(process, thread, "thread", track, thread)
        timed += [_span(event, process, thread, zero) for event in spans]
    return metadata + sorted(timed, key=lambda record: (record["ts"], -record.get("dur", 0)))


def _us(time_s: float, zero: float) -> int:
    """Whole microseconds since `zero`: rounding keeps nested spans nested."""
    return round((time_s - zero) * 1e6)


def _span(event: Event, process: int, thread: int, zero: float) -> Record:
    start, end = _us(event.start, zero), _us(event.end, zero)
    record: Record = {
        "name": event.name,
        "cat": track_group(event.track),
        "pid": process,
        "tid": thread,
        "ts": start,
    }
    if event.end > event.start:
        record |= {"ph": "X", "dur": end - start}
    else:
        record |= {"ph": "i", "s": "g" if event.name == ATTEMPT else "t"}
    if event.details:
        record["args"] = event.details
    return record


# -- the summary


def summary(file: Events) -> str:
    """Who waited for whom and where the time went, in plain text, at most 79 wide."""
    found = usage(file.events)
    if found is None:
        return "the timeline has no span yet"
    steps = f"steps {min(file.steps)} to {max(file.steps)}" if file.steps else "no step yet"
    attempts = f", {file.num_attempts} attempts" if file.num_attempts > 1 else ""
    lines = [
        f"{count(len(file.events), 'event')} over {duration(found.wall_s)}, {steps}{attempts}",
        "",
        "who waited for whom",
    ]
    lines += [f"  {what:<50} {spent / found.wall_s:>4.0%}  {duration(spent):>8}" for what, spent in found.rows]
    lines.append(f"  {found.mean_in_flight:.1f} requests were at a server at once, on average")
    return "\n".join([*lines, *(f"note: {note}" for note in file.notes)])
