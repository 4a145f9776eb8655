"""The recorder of events.jsonl: what it writes, what it survives, how large it gets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpo_async.tracking import timeline as timeline_module
from grpo_async.tracking import timeline_file
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.tracking.timeline_file import ATTEMPT, DROPPED, LOST, Event, read_events
from tests.support.waiting import eventually


def _names(path: Path) -> list[str]:
    return [event.name for event in read_events(path)]


def test_spans_stand_in_the_file_in_the_order_of_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = time.time()
    with Timeline(path, max_mb=1) as timeline:
        with timeline.span("step", "trainer", step=3) as span:
            with timeline.span("forward", "trainer"):
                pass
            span.details["tokens"] = 7
        timeline.instant("up", "server/0")
        timeline.add("send", "weights", 1.25, 2.5, bytes=8)
        timeline.add("clock set back", "trainer", 20.0, 10.0)
        with pytest.raises(KeyError), timeline.span("fails", "trainer"):
            raise KeyError("x")
    events = list(read_events(path))
    assert [event.name for event in events] == ["forward", "step", "up", "send", "clock set back", "fails"]
    forward, step, up, send, set_back, fails = events
    assert fails.details == {"error": "KeyError"}
    assert (set_back.start, set_back.end) == (20.0, 20.0)
    assert step.details == {"step": 3, "tokens": 7}
    assert before <= step.start <= forward.start <= forward.end <= step.end <= time.time()
    assert up.start == up.end
    assert send == Event("send", "weights", 1.25, 2.5, {"bytes": 8})
    assert json.loads(path.read_text().splitlines()[3]) == {
        "name": "send", "track": "weights", "start": 1.25, "end": 2.5, "details": {"bytes": 8},
    }  # fmt: skip


def test_threads_and_coroutines_record_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Timeline(path, max_mb=1) as timeline, ThreadPoolExecutor(4) as pool:

        def work(number: int) -> None:
            for turn in range(200):
                with timeline.span(f"{number}/{turn}", f"rollout/{number}"):
                    pass

        async def task(number: int) -> None:
            with timeline.span(f"task {number}", "scoring"):
                await asyncio.sleep(0.001)

        async def tasks() -> None:
            await asyncio.gather(*(task(number) for number in range(20)))

        done = pool.map(work, range(4))
        asyncio.run(tasks())
        list(done)
    expected = [f"{number}/{turn}" for number in range(4) for turn in range(200)] + [f"task {n}" for n in range(20)]
    assert sorted(_names(path)) == sorted(expected)


_KILLED = """
import os, sys, time
from pathlib import Path
from grpo_async.tracking.timeline import Timeline
timeline = Timeline(Path(sys.argv[1]), max_mb=64)
number = 0
print("started", flush=True)
while True:
    timeline.add("span", "trainer", 1.0, 2.0, number=number, text="x" * 100)
    number += 1
    if number % 200 == 0:
        time.sleep(0.005)
"""


def test_a_kill_leaves_whole_lines_and_the_next_attempt_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE)
    try:
        assert eventually(lambda: path.exists() and path.stat().st_size > 100_000)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10.0)
    with path.open("ab") as file:
        file.write(b'{"name":"torn","track":"tra')  # as a kill within a write leaves it
    numbers = [event.details["number"] for event in read_events(path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 100
    with Timeline(path, max_mb=1) as timeline:
        timeline.instant(ATTEMPT, "run", attempt="2")
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") and json.loads(line) for line in lines)
    assert len(lines) == len(numbers) + 1
    assert json.loads(lines[-1])["name"] == ATTEMPT


def test_a_line_that_is_not_an_event_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event = '{"name":"a","track":"b","start":%s,"end":2.0,"details":{}}\n'
    others = ["not json\n", "7\n", "{}\n", "[" * 100_000 + "\n", event % "NaN", event % ("1" * 400), event % '"x"']
    path.write_text("".join(each + event % "1.0" for each in others))
    assert list(read_events(path)) == [Event("a", "b", 1.0, 2.0, {})] * len(others)


def test_a_write_that_fails_warns_once_stops_nobody_and_is_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_module, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(timeline_module, "_MAX_PENDING", 2)
    path = tmp_path / "missing" / "events.jsonl"
    with caplog.at_level(logging.WARNING), Timeline(path, max_mb=1) as timeline:
        timeline.instant("first", "run")
        assert eventually(lambda: bool(caplog.messages))
        timeline.instant("second", "run")
        assert eventually(lambda: len(timeline._events) == 2)
        timeline.instant("too many", "run")
        assert eventually(lambda: timeline._num_lost == 1 or len(timeline._events) == 3)
        assert sum("cannot write" in message for message in caplog.messages) == 1
        path.parent.mkdir()
        assert eventually(lambda: len(caplog.messages) == 2)
    events = list(read_events(path))
    assert [event.name for event in events][:2] == ["first", "second"]
    assert "can be written again" in caplog.messages[1]


def test_a_file_that_is_full_loses_its_older_half_and_its_first_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = timeline_file.EventWriter(path, max_bytes=20_000)
    lines = [
        timeline_file.event_line(Event("span", "trainer", n, n + 0.5, {"number": n, "text": "é" * 40}))
        for n in range(2000)
    ]
    for begin in range(0, 2000, 20):
        assert file.append("".join(lines[begin : begin + 20]))
        assert path.stat().st_size <= 20_000
    file.close()
    mark, *kept = read_events(path)
    assert mark.name == DROPPED
    assert [event.details["number"] for event in kept] == list(range(2000 - len(kept), 2000))
    assert len(kept) > 25  # about half of 20,000 bytes
    assert mark.start <= kept[0].start
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_no_half_copy_and_it_is_tried_again_a_minute_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    file = timeline_file.EventWriter(path, max_bytes=20_000)
    line = timeline_file.event_line(Event("span", "trainer", 1.0, 2.0, {"text": "x" * 100}))
    while path.stat().st_size + len(line) <= 20_000 if path.exists() else True:
        assert file.append(line)
    size, tries, now = path.stat().st_size, 0, time.monotonic()

    def replace(source: Path, target: Path) -> None:
        nonlocal tries
        tries += 1
        assert source.stat().st_size > 5_000
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(timeline_file.os, "replace", replace)
        assert not any(file.append(line) for _ in range(5))
    assert tries == 1
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_size == size
    assert len(caplog.messages) == 1
    assert not file.append(line)  # there is space again, but it is too early
    monkeypatch.setattr(timeline_file.time, "monotonic", lambda: now + 61.0)
    assert file.append(line)
    file.close()
    assert next(read_events(path)).name == DROPPED
    assert path.stat().st_size < 12_000


def test_events_that_come_faster_than_they_are_written_are_counted_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_module, "_MAX_PENDING", 10)
    path = tmp_path / "events.jsonl"
    with Timeline(path, max_mb=1) as timeline:
        for number in range(25):
            timeline.add("span", "trainer", 1.0, 2.0, number=number)
        assert len(timeline._events) == 10
    events = list(read_events(path))
    assert [event.name for event in events] == ["span"] * 10 + [LOST]
    assert events[-1].details == {"events": 15}


def test_an_event_that_is_lost_while_the_count_is_written_is_counted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_module, "_MAX_PENDING", 1)
    path = tmp_path / "events.jsonl"
    counts: list[str] = []

    def event(name: str, *rest: Any) -> Event:
        if name == LOST and not counts:
            counts.append(name)
            timeline.instant("another thread's", "run")
        return Event(name, *rest)

    with Timeline(path, max_mb=1) as timeline:
        timeline.instant("kept", "run")
        monkeypatch.setattr(timeline_module, "Event", event)
        timeline.instant("lost", "run")
    assert counts, "nothing was counted"
    found = [event for event in read_events(path) if event.name == LOST]
    assert sum(event.details["events"] for event in found) == 2


def test_any_detail_gives_a_line_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    details: list[tuple[Any, Any]] = [
        (float("nan"), None), (float("inf"), None), (True, True), (None, None), ("a\nb\x1b[0m", "a\nb\x1b[0m"),
        ("x" * 300, "x" * 199 + "…"), (["y" * 300, 1], ["y" * 199 + "…", 1]), (Path("/a"), "/a"), (1 / 3, 0.333333),
        ("\ud800", "\ud800"),
    ]  # fmt: skip
    with Timeline(path, max_mb=1) as timeline:
        for value, _ in details:
            timeline.instant("a", "b", detail=value)
    assert [event.details["detail"] for event in read_events(path)] == [kept for _, kept in details]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_each_of_those_that_run_at_once_has_the_lowest_free_slot(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Timeline(path, max_mb=1) as timeline:
        slots = timeline.slots("rollout")
        first, second = slots.take(), slots.take()
        assert (first.name, second.name) == ("rollout/0", "rollout/1")
        slots.release(first)
        with slots.span("rollout", rollout="g0-r1") as (track, _), track.span("generate"):
            assert track.name == "rollout/0"
            assert slots.take().name == "rollout/2"
        assert slots.take().name == "rollout/0"
        third = slots.take()
        for track in (third, second):
            slots.release(track)
        assert slots.take() == second
    assert [(event.name, event.track) for event in read_events(path)] == [
        ("generate", "rollout/0"),
        ("rollout", "rollout/0"),
    ]


def test_a_closed_timeline_and_that_of_other_ranks_record_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with NO_TIMELINE.span("a", "b"), NO_TIMELINE.slots("c").span("d"):
        NO_TIMELINE.instant("e", "f")
    opened = Timeline(path)
    opened.close()
    opened.close()
    opened.instant("too late", "run")
    assert not path.exists() or _names(path) == []
