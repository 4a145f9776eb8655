"""From spans to a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_async.viewer.trace import trace_events, write_trace
from tests.support.trace_format import check_trace, read_trace


def _span(name: str, start: float, end: float, **place: str) -> dict[str, Any]:
    return {"name": name, "start": start, "end": end, **place, "details": {}}


_RUN = [
    _span("generate", 1000.0, 1003.0, task="Task-7"),
    _span("rollout", 1000.0, 1004.0, task="Task-7"),
    _span("rollout", 1001.0, 1005.0, task="Task-8"),
    _span("queued", 1004.0, 1006.0),
    _span("queued", 1004.0, 1006.0),
    _span("attempt", 1000.0, 1000.0),
    _span("forward", 1006.0, 1007.0, thread="MainThread"),
    _span("train", 1006.0, 1009.0, thread="MainThread"),
    _span("write checkpoint", 1006.5, 1010.0, thread="checkpoint"),
]


def test_threads_have_rows_and_the_spans_of_a_task_stay_together() -> None:
    records = trace_events(_RUN, title="demo")
    check_trace(records)
    names = {record["args"]["name"] for record in records if record["ph"] == "M"}
    assert names == {"demo", "MainThread", "checkpoint"}
    nested = [record for record in records if record["ph"] == "X" and record["tid"] == 1]
    assert [(record["name"], record["ts"], record["dur"]) for record in nested] == [
        ("train", 6_000_000, 3_000_000),
        ("forward", 6_000_000, 1_000_000),
    ]
    begun = [(record["name"], record["id"]) for record in records if record["ph"] == "b"]
    assert begun == [
        ("rollout", "Task-7"), ("generate", "Task-7"), ("attempt", "span 0"), ("rollout", "Task-8"), ("queued", "span 1"),
        ("queued", "span 2"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_written_whole_and_compressed_by_its_name(tmp_path: Path, name: str) -> None:
    events, path = tmp_path / "events.jsonl", tmp_path / name
    events.write_text("".join(json.dumps(each) + "\n" for each in _RUN) + '{"name":"torn')
    assert write_trace(events, path, title="demo") == len(_RUN)
    assert {record["name"] for record in read_trace(path)} >= {span["name"] for span in _RUN}
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")
    assert sorted(tmp_path.iterdir()) == sorted([events, path])
