"""Turns the spans of a run into a file for Perfetto (https://ui.perfetto.dev, which keeps it in the browser) or Chrome.

Trace Event Format, JSON, in microseconds since the first span. A thread has a row, on which its spans nest ("X"). What ran at the
same time in tasks, or in no thread, is asynchronous ("b" and "e"): Perfetto finds room for it.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from grpo_async.errors import ConfigError
from grpo_async.tracking.timeline import Span, read_spans
from grpo_async.utils.files import replacing

PERFETTO = "https://ui.perfetto.dev"
_PROCESS = {"pid": 1}


def write_trace(events: Path, path: Path, *, title: str) -> int:
    """Write the spans of events.jsonl to `path`, compressed where it ends in ".gz". Returns the number of spans."""
    try:
        spans = list(read_spans(events))
    except OSError as error:
        raise ConfigError(
            f"cannot read the timeline {events}: {error.strerror}; a run writes one from its first step on"
        ) from error
    trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(spans, title=title)}
    try:
        with replacing(path) as temporary, _open(temporary, is_compressed=path.suffix == ".gz") as file:
            json.dump(trace, file, separators=(",", ":"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --out") from error
    return len(spans)


def _open(path: Path, *, is_compressed: bool) -> IO[str]:
    if is_compressed:
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=6)
    return path.open("w", encoding="utf-8")


def trace_events(spans: Iterable[Span], *, title: str) -> list[dict[str, Any]]:
    """The records of a trace: the names, then everything by time, outer spans before what lies in them."""
    ordered = sorted(spans, key=lambda span: (span["start"], -span["end"]))
    zero = ordered[0]["start"] if ordered else 0.0
    threads: dict[str, int] = {}
    numbers = itertools.count()
    timed: list[dict[str, Any]] = []
    for span in ordered:
        start, end = (round((span[key] - zero) * 1e6) for key in ("start", "end"))  # rounding keeps nested spans nested
        base = {**_PROCESS, "name": span["name"], "cat": "run", "ts": start}
        args = {"args": span.get("details") or {}}
        if name := span.get("thread"):
            thread = threads.setdefault(str(name), len(threads) + 1)
            timed.append({**base, "ph": "X", "tid": thread, "dur": end - start, **args})
        else:
            lane = {"tid": 0, "id": str(span.get("task") or f"span {next(numbers)}")}
            timed.append({**base, "ph": "b", **lane, **args})
            timed.append({**base, "ph": "e", **lane, "ts": max(end, start + 1)})
    names = [_name("process_name", 0, title), *(_name("thread_name", tid, name) for name, tid in threads.items())]
    return names + sorted(timed, key=lambda record: record["ts"])


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {**_PROCESS, "name": kind, "ph": "M", "tid": thread, "ts": 0, "args": {"name": name}}
