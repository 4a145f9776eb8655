"""The clock of a step on a GPU, with events that stand in for CUDA's: it never raises, and loses no part that is late."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.tracking.timeline import Timeline
from grpo_async.tracking.timeline_file import read_events
from grpo_async.training.timing import StepClock, Stopwatch


class _Settings:
    enabled = True
    max_mb = 1


class _Gpu:
    """Runs in order what it was told; an event is passed when all before it is done, at the second that `run_to` says."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.passed_at: list[float] = []
        self.is_broken = False

    def run_to(self, second: float, num_events: int | None = None) -> None:
        """Pass the events that were recorded, all or the first `num_events` of all."""
        while len(self.passed_at) < (self.num_recorded if num_events is None else num_events):
            self.passed_at.append(second)


class _Event:
    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu
        self._number = -1

    def record(self) -> None:
        if self._gpu.is_broken:
            raise RuntimeError("CUDA error: out of memory")
        self._number = self._gpu.num_recorded
        self._gpu.num_recorded += 1

    def query(self) -> bool:
        return len(self._gpu.passed_at) > self._number

    def elapsed_time(self, other: _Event) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (self._gpu.passed_at[other._number] - self._gpu.passed_at[self._number]) * 1000.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    made = _Gpu()

    def event(**_: Any) -> _Event:
        return _Event(made)

    monkeypatch.setattr(torch.cuda, "Event", event)
    return made


def _clock(timeline: Timeline) -> StepClock:
    return StepClock(timeline, torch.device("cuda"))


def test_a_part_whose_end_the_gpu_has_not_passed_is_read_the_next_time(tmp_path: Path, gpu: _Gpu) -> None:
    path = tmp_path / "events.jsonl"
    began = time.time()
    with Timeline(path, settings=_Settings()) as timeline:
        clock = _clock(timeline)
        clock.synchronised()
        gpu.run_to(10.0)
        with clock.part("forward", micro_batch=0):
            gpu.run_to(11.0)
        gpu.run_to(12.0)
        with clock.part("clip gradients"):
            gpu.run_to(13.0)
        clock.synchronised()  # the host has read the norm; the event behind it is on its way
        assert len(clock._pending) == 1
        gpu.run_to(14.0)
        with clock.part("optimizer"):
            pass
        gpu.run_to(15.0)
        clock.synchronised()
        assert clock._pending == []
    events = list(read_events(path))
    assert [event.name for event in events] == ["forward", "clip gradients", "optimizer"]
    assert [round(event.duration_s, 3) for event in events] == [1.0, 1.0, 0.0]
    forward, clip, _ = events
    assert clip.start - forward.start == pytest.approx(2.0, abs=1e-3)  # by the anchor that both were recorded after
    assert began + 1.0 <= forward.start <= time.time() + 1.0
    assert {event.lane for event in events} == {"gpu"}


def test_what_cuda_refuses_stops_the_clock_with_one_warning_and_nothing_else(
    tmp_path: Path, gpu: _Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that ends, one that begins, and what has waited to be read."""
    with Timeline(tmp_path / "events.jsonl", settings=_Settings()) as timeline, caplog.at_level(logging.WARNING):
        for breaks_within in (True, False):
            clock = _clock(timeline)
            gpu.is_broken = False
            clock.synchronised()
            with clock.part("forward"):
                gpu.is_broken = breaks_within
            gpu.is_broken = True
            gpu.run_to(1.0)
            for _ in range(2):
                clock.synchronised()  # the anchor cannot be recorded
            with pytest.raises(KeyError), clock.part("backward"):
                raise KeyError("the body's own error passes")
    assert [message for message in caplog.messages if "not timed any more" in message] == [
        "the parts of a step are not timed any more: CUDA error: out of memory"
    ] * 2


def _watch() -> tuple[Stopwatch, list[float]]:
    """A stopwatch and its clock, which the tests set."""
    clock = [100.0]
    return Stopwatch(lambda: clock[0]), clock


def test_what_is_done_inside_something_else_is_not_counted_there() -> None:
    """5 s of waiting with a push of 2 s in the middle, then 1 s of nothing, then 4 s of training."""
    watch, clock = _watch()
    with watch.during("waiting"):
        clock[0] = 102.0
        with watch.during("pushing"):
            clock[0] = 104.0
        clock[0] = 105.0
    clock[0] = 106.0
    with watch.during("training"):
        clock[0] = 110.0
    assert watch.take() == {"waiting": 3.0, "pushing": 2.0, "training": 4.0}
    assert watch.take() == {}


def test_what_ends_with_an_error_is_counted_too() -> None:
    watch, clock = _watch()

    def fails() -> None:
        with watch.during("pushing"):
            clock[0] = 101.0
            raise RuntimeError("lost")

    with watch.during("waiting"):
        with pytest.raises(RuntimeError, match="lost"):
            fails()
        clock[0] = 103.0
    assert watch.take() == {"pushing": 1.0, "waiting": 2.0}
