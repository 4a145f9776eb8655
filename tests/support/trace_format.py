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
    content = json.loads(text)
    assert json.dumps(content, allow_nan=False)
    assert content["displayTimeUnit"] == "ms"
    check_trace(content["traceEvents"])
    return content["traceEvents"]


def check_trace(records: list[dict[str, Any]]) -> None:
    """Assert that every record is sound, and that they fit together."""
    last = 0
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    depths: dict[str, int] = defaultdict(int)  # by id
    named = {(record["pid"], record["tid"]) for record in records if record["name"] == "thread_name"}
    for record in records:
        assert record["ph"] in ("M", "X", "b", "e"), record
        assert [type(record[name]) for name in ("name", "pid", "tid", "ts")] == [str, int, int, int], record
        assert record["ts"] >= last, f"not sorted: {record}"
        last = record["ts"]
        if record["ph"] == "X":
            assert record["dur"] >= 0, record
            assert (record["pid"], record["tid"]) in named, record
            threads[record["pid"], record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
        elif record["ph"] in ("b", "e"):
            depths[record["id"]] += 1 if record["ph"] == "b" else -1
            assert depths[record["id"]] >= 0, f"ends before it begins: {record}"
    assert not any(depths.values()), "begun, and never ended"
    for spans in threads.values():
        open_until: list[int] = []
        for start, end in spans:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{(start, end)} overlaps without nesting"
            open_until.append(end)
