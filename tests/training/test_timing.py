"""The clock of a step on a GPU, with events that stand in for CUDA's, and the stopwatch of a thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.tracking.timeline import Timeline
from grpo_async.tracking.timeline_file import read_events
from grpo_async.training.timing import Activity, StepClock


class _Gpu:
    """Runs in order what it was told; an event is passed when all before it is done, at the second that `run_to` says."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.passed_at: list[float] = []

    def run_to(self, second: float, num_events: int | None = None) -> None:
        """Pass the events that were recorded, all or the first `num_events` of all."""
        while len(self.passed_at) < (self.num_recorded if num_events is None else num_events):
            self.passed_at.append(second)


class _Event:
    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu
        self._number = -1

    def record(self) -> None:
        self._number = self._gpu.num_recorded
        self._gpu.num_recorded += 1

    def query(self) -> bool:
        return len(self._gpu.passed_at) > self._number

    def elapsed_time(self, other: _Event) -> float:
        assert self.query()
        assert other.query()
        return (self._gpu.passed_at[other._number] - self._gpu.passed_at[self._number]) * 1000.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    made = _Gpu()

    def event(**_: Any) -> _Event:
        return _Event(made)

    monkeypatch.setattr(torch.cuda, "Event", event)
    return made


def test_a_part_whose_end_the_gpu_has_not_passed_is_read_the_next_time(tmp_path: Path, gpu: _Gpu) -> None:
    path = tmp_path / "events.jsonl"
    began = time.time()
    with Timeline(path, max_mb=1) as timeline:
        clock = StepClock(timeline, torch.device("cuda"))
        clock.synchronized()
        gpu.run_to(10.0)
        with clock.part("forward", micro_batch=0):
            gpu.run_to(11.0)
        gpu.run_to(12.0)
        with clock.part("clip gradients"):
            gpu.run_to(13.0)
        clock.synchronized()  # the host has read the norm; the event behind it is on its way
        assert len(clock._pending) == 1
        gpu.run_to(14.0)
        with clock.part("optimizer"):
            pass
        gpu.run_to(15.0)
        clock.synchronized()
        assert clock._pending == []
    events = list(read_events(path))
    assert [event.name for event in events] == ["forward", "clip gradients", "optimizer"]
    assert [round(event.duration_s, 3) for event in events] == [1.0, 1.0, 0.0]
    forward, clip, _ = events
    assert clip.start - forward.start == pytest.approx(2.0, abs=1e-3)  # by the anchor that both were recorded after
    assert began + 1.0 <= forward.start <= time.time() + 1.0
    assert {event.track for event in events} == {"gpu"}


def test_what_is_done_inside_something_else_is_not_counted_there_and_an_error_is_counted_too() -> None:
    """5 s of waiting with a push of 2 s in the middle that fails, then 1 s of nothing, then 4 s of training."""
    clock = [100.0]
    activity = Activity(clock=lambda: clock[0])
    activity.begin("in step 2")

    def push() -> None:
        with activity.during("pushing version 1", "push", "pushing"):
            clock[0] = 104.0
            assert str(activity) == "pushing version 1, for 2 s"
            raise RuntimeError("lost")

    with activity.during("waiting for the samples of step 2", "wait", "waiting"):
        clock[0] = 102.0
        with pytest.raises(RuntimeError, match="lost"):
            push()
        clock[0] = 105.0
        assert str(activity) == "waiting for the samples of step 2, for 5 s"
    clock[0] = 106.0
    with activity.during("training step 2", "train", "training"):
        clock[0] = 110.0
    assert str(activity) == "in step 2, for 10 s"
    assert activity.num_begun == 3, "a push to a server that came back is no progress"
    assert activity.take_seconds() == {"waiting": 3.0, "pushing": 2.0, "training": 4.0}
    assert activity.take_seconds() == {}
