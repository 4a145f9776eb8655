"""What the Trace Event Format asks of a file, as far as Perfetto refuses or misreads what does not keep it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The records of a trace, after `check_trace`."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    content = json.loads(text, parse_constant=_refuse)
    assert content["displayTimeUnit"] == "ms"
    check_trace(content["traceEvents"])
    return content["traceEvents"]


def check_trace(records: list[dict[str, Any]]) -> None:
    """Assert that every record is sound, and that they fit together."""
    last = 0
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named = {(record["pid"], record["tid"]) for record in records if record["name"] == "thread_name"}
    for record in records:
        assert record["ph"] in ("M", "X", "i", "C", "s", "t", "f"), record
        assert isinstance(record["name"], str), record
        assert isinstance(record["pid"], int), record
        assert isinstance(record["tid"], int), record
        assert isinstance(record["ts"], int), record
        assert record["ts"] >= last, f"not sorted: {record}"
        last = record["ts"]
        if record["ph"] == "X":
            assert isinstance(record["dur"], int), record
            assert record["dur"] >= 0, record
            assert (record["pid"], record["tid"]) in named, record
            threads[record["pid"], record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
        elif record["ph"] == "i":
            assert record["s"] in ("g", "p", "t"), record
        elif record["ph"] == "C":
            assert all(value >= 0 for value in record["args"].values()), record
        elif record["ph"] in ("s", "t", "f"):
            arrows[record["id"]].append(record)
    for spans in threads.values():
        open_until: list[int] = []
        for start, end in spans:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{(start, end)} overlaps without nesting"
            open_until.append(end)
    for stops in arrows.values():
        assert [stop["ph"] for stop in stops] == ["s", *["t"] * (len(stops) - 2), "f"]
        assert stops[-1]["bp"] == "e"
        for stop in stops:
            spans = threads[stop["pid"], stop["tid"]]
            assert any(start <= stop["ts"] <= end for start, end in spans), f"bound to nothing: {stop}"


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
