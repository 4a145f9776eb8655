"""The recorder of events.jsonl: what it writes, what it survives, how large it gets."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from grpo_async.tracking import timeline
from grpo_async.tracking.timeline import older, read_spans, record, recording, span
from tests.support.waiting import eventually


def _names(path: Path) -> list[str]:
    return [each["name"] for each in read_spans(path)]


async def _task() -> None:
    with span("task"):
        pass


def test_spans_stand_in_the_file_in_the_order_of_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = time.time()
    with recording(path):
        with span("step", step=3) as details:
            with span("forward"):
                pass
            details["tokens"] = 7
        record("send", 1.25, 2.5, bytes=8)
        record("clock set back", 20.0, 10.0)
        with pytest.raises(KeyError), span("fails"):
            raise KeyError("x")
        asyncio.run(_task())
    with path.open("ab") as file:  # as a kill within a write leaves it, which the next attempt cuts off; and no spans
        file.write(b'7\n{"name":"a","start":NaN,"end":2.0,"details":{}}\n{"name":"torn","sta')
    with recording(path):
        record("attempt", 30.0, 30.0)
    forward, step, send, set_back, fails, of_task, attempt = read_spans(path)
    assert attempt["name"] == "attempt"
    assert ("thread" in of_task, of_task["task"][:5]) == (False, "Task-")
    assert [each["name"] for each in (forward, step, fails)] == ["forward", "step", "fails"]
    assert fails["details"] == {"error": "KeyError"}
    assert (set_back["start"], set_back["end"]) == (20.0, 20.0)
    assert (step["details"], step["thread"]) == ({"step": 3, "tokens": 7}, threading.current_thread().name)
    assert before <= step["start"] <= forward["start"] <= forward["end"] <= step["end"] <= time.time()
    assert send == {"name": "send", "start": 1.25, "end": 2.5, "details": {"bytes": 8}}


def test_a_disk_that_is_full_for_a_while_loses_nothing_that_fits_into_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(timeline, "_MAX_PENDING", 2)
    path = tmp_path / "missing" / "events.jsonl"
    with caplog.at_level(logging.WARNING), recording(path):
        record("first", 1.0, 1.0)
        assert eventually(lambda: bool(caplog.messages))
        record("second", 1.0, 1.0)

        def is_full() -> bool:  # not while the writer holds what waits in its hands
            record("too many", 1.0, 1.0)
            return any("spans are missing" in message for message in caplog.messages)

        assert eventually(is_full)
        assert sum("cannot write" in message for message in caplog.messages) == 1
        path.parent.mkdir()
        assert eventually(lambda: any("can be written again" in message for message in caplog.messages))
    assert _names(path)[:2] == ["first", "second"]


def test_a_file_that_is_full_is_put_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MAX_BYTES", 20_000)
    monkeypatch.setattr(timeline, "_BATCH", 20)
    path = tmp_path / "events.jsonl"
    with recording(path):
        for number in range(2000):
            record("span", number, number + 0.5, number=number, text="x" * 40)
    assert all(each.stat().st_size <= 20_000 for each in (path, older(path)))
    kept = [each["details"]["number"] for each in read_spans(path)]
    assert kept == list(range(2000 - len(kept), 2000))
    assert len(kept) > 150  # more than one file of 20,000 bytes holds
    assert sorted(tmp_path.iterdir()) == sorted([path, older(path)])
