"""The timeline of a real run: every kind of work is in it, it fits together, and a resume goes on in the same file."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from grpo_async.tracking.timeline_file import ATTEMPT, Event, read_events
from grpo_async.viewer.timeline import by_track, load_events, overlap, track_group, union, usage
from tests.e2e.conftest import GoldenRun
from tests.e2e.support import run_command
from tests.support.trace_format import read_trace


def _kinds(events: list[Event]) -> set[tuple[str, str]]:
    return {(track_group(event.track), event.name) for event in events}


@pytest.fixture(scope="module")
def events(golden_run: GoldenRun) -> list[Event]:
    return list(read_events(golden_run.run.folder / "events.jsonl"))


def test_every_kind_of_work_is_in_the_timeline(events: list[Event]) -> None:
    expected = {
        ("run", ATTEMPT), ("run", "loading the model"), ("run", "waiting for the server"),
        ("run", "pushing the first weights"), ("run", "checking trainer and servers against each other"),
        ("run", "training"), ("run", "saving"),
        ("rollout", "rollout"), ("rollout", "generate"), ("rollout", "wait for the trainer"),
        ("scoring", "score"), ("queue", "queued"),
        ("trainer", "step"), ("trainer", "wait for samples"), ("trainer", "plan and pack"), ("trainer", "train"),
        ("trainer", "forward"), ("trainer", "backward"), ("trainer", "clip gradients"), ("trainer", "optimizer"),
        ("trainer", "close groups"), ("trainer", "wait for the push"), ("trainer", "log"), ("trainer", "copy checkpoint"),
        ("trainer", "wait for the checkpoint"), ("trainer", "export the model"),
        ("weights", "push"), ("weights", "connect"), ("weights", "pause"), ("weights", "start"), ("weights", "transfer"),
        ("weights", "gather"), ("weights", "send"), ("weights", "finish"), ("weights", "resume"),
        ("checkpoint", "write checkpoint"), ("checkpoint", "remove old checkpoints"),
        ("evaluation", "evaluation"), ("evaluation", "rollout"), ("evaluation", "generate"),
        ("server", "starting"), ("server", "ready"), ("server", "serving"),
    }  # fmt: skip
    assert expected - _kinds(events) == set()


def test_each_step_of_both_attempts_has_its_parts(golden_run: GoldenRun, events: list[Event]) -> None:
    file = load_events(golden_run.run.folder / "events.jsonl")
    assert sorted(file.steps) == [1, 2, 3, 4, 5, 6]
    assert file.num_attempts == 2
    assert file.notes == []
    marks = [event.details for event in events if event.name == ATTEMPT and event.start == event.end]
    assert [mark["attempt"] for mark in marks] == ["1", "2"]
    assert "resume_step" not in marks[0]
    assert marks[1]["resume_step"] == 4
    for name in ("wait for samples", "train", "close groups", "log"):
        assert [e.details["step"] for e in events if e.name == name and "step" in e.details] == [1, 2, 3, 4, 5, 6]
    assert [e.details["version"] for e in events if (e.track, e.name) == ("weights", "push")] == [
        0,
        1,
        2,
        3,
        4,
        4,
        5,
        6,
    ]


def test_spans_of_a_lane_lie_inside_each_other_or_apart(events: list[Event]) -> None:
    parents: dict[str, set[str]] = defaultdict(set)
    for track, spans in by_track(events).items():
        stack: list[Event] = []
        for event in spans:
            if event.end == event.start:
                continue
            while stack and stack[-1].end <= event.start:
                stack.pop()
            assert not stack or event.end <= stack[-1].end, f"two at once had the track {track}: {stack[-1]}, {event}"
            parents[event.name].add(stack[-1].name if stack else "")
            stack.append(event)
    assert parents["forward"] == parents["backward"] == parents["optimizer"] == {"train"}
    assert parents["plan and pack"] <= {"train", "clip gradients"}, (
        "in the first step before it, then behind a backward pass"
    )
    assert parents["train"] == parents["close groups"] == parents["wait for samples"] == {"step"}
    assert parents["generate"] == {"rollout"}
    assert parents["pause"] == parents["transfer"] == parents["finish"] == parents["resume"] == {"push"}
    assert parents["gather"] == {"transfer"}


def test_generation_and_training_overlap_and_the_usage_adds_up(events: list[Event]) -> None:
    generating = union(event for event in events if (track_group(event.track), event.name) == ("rollout", "generate"))
    training = union(event for event in events if event.name == "train")
    assert overlap(generating, training) > 0.0
    found = usage(events)
    assert found is not None
    assert found.both_s > 0.0
    assert 0.0 <= found.trainer_waits_s <= found.wall_s
    assert 0.0 <= found.generation_idle_s <= found.wall_s


def test_the_trace_of_the_run_keeps_the_rules_of_its_format(golden_run: GoldenRun, tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    done = run_command("trace", str(golden_run.run.folder), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "who waited for whom" in done.stdout
    records = read_trace(out)
    assert len(records) > 50
    assert {record["ph"] for record in records} == {"M", "X", "i"}
