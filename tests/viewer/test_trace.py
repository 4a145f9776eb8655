"""From events to a trace for Perfetto, and to who waited for whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.errors import ConfigError
from grpo_async.tracking.timeline_file import ATTEMPT, DROPPED, LOST, Event
from grpo_async.viewer.timeline import by_track, load_events, usage
from grpo_async.viewer.trace import summary, trace_records, write_trace
from tests.support.trace_format import check_trace, read_trace


def _span(name: str, track: str, start: float, end: float, **details: Any) -> Event:
    return Event(name, track, start, end, details)


def _run() -> list[Event]:
    """One step of a run that begins at second 1000: rollouts 0-4 and 1-5, scored, queued until 6, trained 6-9, pushed 9-10."""
    return [
        Event(ATTEMPT, "run", 1000.0, 1000.0, {"attempt": "1"}),
        _span("rollout", "rollout/0", 1000.0, 1004.0, rollout="g0-r0", group="g0"),
        _span("generate", "rollout/0", 1000.0, 1003.0, turn=0),
        _span("tools", "rollout/0", 1003.0, 1004.0, calls=["python"]),
        _span("rollout", "rollout/1", 1001.0, 1005.0, rollout="g0-r1", group="g0"),
        _span("generate", "rollout/1", 1001.0, 1005.0, turn=0),
        _span("score", "scoring/0", 1005.0, 1005.5, group="g0"),
        _span("queued", "queue/0", 1005.5, 1006.0, group="g0", step=1),
        _span("wait for samples", "trainer", 1000.0, 1006.0, step=1),
        _span("forward", "trainer", 1006.0, 1007.0),
        _span("backward", "trainer", 1007.0, 1009.0),
        _span("train", "trainer", 1006.0, 1009.0, step=1),
        _span("push", "weights", 1009.0, 1010.0, version=1),
        _span("wait for the push", "trainer", 1009.0, 1010.0, version=1),
        _span("step", "trainer", 1000.0, 1010.0, step=1),
    ]


def _write(path: Path, events: list[Event], *, more: str = "") -> Path:
    lines = [
        json.dumps({"name": e.name, "track": e.track, "start": e.start, "end": e.end, "details": e.details}, separators=(",", ":"))
        for e in events
    ]  # fmt: skip
    path.write_text("".join(line + "\n" for line in lines) + more)
    return path


# -- tracks


def test_tracks_are_in_the_order_of_the_pipeline_and_outer_spans_come_first() -> None:
    tracks = by_track(_run())
    assert list(tracks) == ["run", "trainer", "rollout/0", "rollout/1", "weights", "queue/0", "scoring/0"]
    names = [event.name for event in tracks["trainer"]]
    assert names == ["step", "wait for samples", "train", "forward", "backward", "wait for the push"]
    slots = [
        _span("a", track, 0, 1) for track in ("rollout/10", "rollout/9", "other", "trainer", "rollout", "rollout/x")
    ]
    assert list(by_track(slots)) == ["trainer", "rollout", "rollout/9", "rollout/10", "rollout/x", "other"]


# -- who waited for whom


def test_waiting_is_measured_against_what_the_others_did_meanwhile() -> None:
    found = usage(_run())
    assert found is not None
    assert found.wall_s == 10.0
    assert found.trainer_waits_s == 6.0
    assert found.trainer_waits_generating_s == 5.0  # generated 0 to 5
    assert found.generation_idle_s == 5.0  # 5 to 10
    assert found.generation_idle_by == {"wait for samples": 1.0, "train": 3.0, "wait for the push": 1.0}
    assert found.both_s == 0.0
    assert found.mean_in_flight == 7.0 / 5.0


def test_only_the_time_of_the_steps_counts_and_what_has_a_name() -> None:
    before = _span("loading the model", "run", 900.0, 1000.0)
    found = usage([*_run(), before, _span("generate", "rollout/0", 1009.0, 1090.0)])
    assert found is not None
    assert found.wall_s == 10.0
    assert found.generation_idle_s == 4.0
    assert usage([Event("a", "b", 1.0, 1.0)]) is None
    found = usage(
        [Event("step", "trainer", 5.0, 5.0), _span("generate", "rollout/0", 1.0, 3.0)]
    )  # the clock was set back
    assert found is not None
    assert found.wall_s == 2.0


def test_the_pause_between_two_attempts_is_nobodys_time() -> None:
    later = [Event(e.name, e.track, e.start + 5000.0, e.end + 5000.0, e.details) for e in _run()]
    killed = _span("generate", "rollout/0", 1010.0, 1012.0)  # after the attempt's last step
    found, once = usage([*_run(), killed, *later]), usage(_run())
    assert found is not None
    assert once is not None
    assert found.wall_s == 2 * once.wall_s + 2.0
    assert found.generation_idle_s == 2 * once.generation_idle_s
    assert found.trainer_waits_s == 2 * once.trainer_waits_s


def test_the_summary_names_waits_and_shares_and_obeys_no_text(tmp_path: Path) -> None:
    hostile = _span("\x1b]0;owned\x07wait for \x1b[31mred", "\x1b[2Jrollout", 1000.0, 1001.0, group="\x1b[1m" * 50)
    file = load_events(_write(tmp_path / "events.jsonl", [*_run(), hostile]))
    text = summary(file)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "the trainer waited for samples 60% 6 s" in lines
    assert "– of it, while requests were generated 50% 5 s" in lines
    assert "1.4 requests were at a server at once, on average" in lines
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 79
    assert summary(load_events(_write(tmp_path / "none.jsonl", []))) == "the timeline has no span yet"


# -- the trace


def test_rounding_to_microseconds_keeps_what_nests_nested() -> None:
    start = 1_763_760_000.123456
    spans = [_span("outer", "trainer", start + n * 3.3e-6, start + n * 3.3e-6 + 3.2e-6) for n in range(200)]
    spans += [_span("inner", "trainer", s.start + 0.4e-6, s.end - 0.3e-6) for s in spans]
    check_trace(trace_records(spans, title="demo"))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_written_whole_and_compressed_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    number = write_trace(_run(), path, title="demo")
    assert len(read_trace(path)) == number
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")
    assert list(tmp_path.iterdir()) == [path]
    assert write_trace([], path, title="demo") == 0
    assert read_trace(path) == []
    with pytest.raises(ConfigError, match=r"cannot write .*missing/t.json: No such file.*--out"):
        write_trace(_run(), tmp_path / "missing" / "t.json", title="demo")


# -- a run directory


def _steps(count: int) -> list[Event]:
    return [_span("step", "trainer", 10.0 * n, 10.0 * n + 10.0, step=n) for n in range(1, count + 1)]


def test_of_the_newest_steps_there_is_what_touches_their_time(tmp_path: Path) -> None:
    rollouts = [_span("rollout", "rollout/0", 10.0 * n + 5, 10.0 * n + 14, group=f"g{n}") for n in range(1, 6)]
    path = _write(tmp_path / "events.jsonl", [*_steps(5), *rollouts])
    found = load_events(path, newest_steps=2)  # from 40 on
    assert [e.details["group"] for e in found.events if e.name == "rollout"] == ["g3", "g4", "g5"]
    assert sorted(found.steps) == [1, 2, 3, 4, 5]
    assert len(load_events(path).events) == 10


def test_a_step_that_was_made_twice_counts_as_it_was_made_last(tmp_path: Path) -> None:
    again = [_span("step", "trainer", 100.0, 110.0, step=2), _span("generate", "rollout/0", 101.0, 102.0)]
    attempt = Event(ATTEMPT, "run", 90.0, 90.0, {"attempt": "2"})
    path = _write(tmp_path / "events.jsonl", [Event(ATTEMPT, "run", 5.0, 5.0), *_steps(2), attempt, *again])
    assert [event.start for event in load_events(path, newest_steps=1).events] == [100.0, 101.0]
    whole = load_events(path)
    assert whole.num_attempts == 2
    assert "2 attempts" in summary(whole)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    dropped = Event(DROPPED, "run", 1.0, 1.0)
    lost = Event(LOST, "run", 2.0, 2.0, {"events": 3})
    path = _write(tmp_path / "events.jsonl", [dropped, *_steps(1), lost], more='{"name":"step","track":"tr')
    text = summary(load_events(path))
    assert "note: the oldest events were dropped to keep the file small" in text
    assert "note: 3 events could not be written" in text


def test_wrong_input_is_answered_with_what_there_is(tmp_path: Path) -> None:
    def answer(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["trace", str(tmp_path), *arguments])
        assert done.exit_code == 2
        return " ".join(done.output.split())

    assert "there is no run" in answer()
    (tmp_path / "metrics.jsonl").touch()
    assert "cannot read the timeline" in answer()
    _write(tmp_path / "events.jsonl", _steps(3))
    assert "cannot write /nowhere/t.json" in answer("--out", "/nowhere/t.json")
    assert not (tmp_path / "trace.json.gz").exists()
