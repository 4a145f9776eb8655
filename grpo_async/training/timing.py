"""When the parts of a training step ran (StepClock), what a thread's seconds went into (Stopwatch), and the peak of memory."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from grpo_async.tracking.timeline import NO_TIMELINE, Timeline

logger = logging.getLogger(__name__)

_LANE = "trainer"
_GPU_LANE = "gpu"
_MOST_PENDING = 4096  # parts between two synchronisations; more are left out


@dataclass(frozen=True, slots=True)
class _Anchor:
    event: torch.cuda.Event
    at: float
    """The host's time when the event was recorded: the GPU had nothing to do then, and passed it at once."""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    anchor: _Anchor
    begin: torch.cuda.Event
    end: torch.cuda.Event
    details: dict[str, Any]


class StepClock:
    """Used by the training thread.

    Args:
        device: where the step runs.
    """

    def __init__(self, timeline: Timeline, device: torch.device) -> None:
        self._timeline = timeline
        self._is_on_gpu = device.type == "cuda"
        self._is_off = timeline is NO_TIMELINE
        self._anchor: _Anchor | None = None
        self._pending: list[_Part] = []

    def part(self, name: str, **details: Any) -> AbstractContextManager[object]:
        """`with clock.part("forward"): ...`; never waits for the GPU."""
        if self._is_off:
            return nullcontext()
        if self._is_on_gpu:
            return self._on_gpu(name, details)
        return self._timeline.span(name, _LANE, **details)

    def synchronised(self) -> None:
        """The host has just read a result of the GPU, which so has done all before it. Also before the first part."""
        if self._is_off or not self._is_on_gpu:
            return
        waiting: list[_Part] = []
        try:
            for part in self._pending:
                if part.end.query():  # type: ignore[no-untyped-call]
                    start, stop = (
                        part.anchor.at + _seconds(part.anchor.event, each) for each in (part.begin, part.end)
                    )
                    self._timeline.add(part.name, _GPU_LANE, start, stop, **part.details)
                else:  # recorded after that result was on its way
                    waiting.append(part)
            self._anchor = _Anchor(_record(), time.time())
        except RuntimeError as error:
            self._stop(error)
            return
        self._pending = waiting

    @contextmanager
    def _on_gpu(self, name: str, details: dict[str, Any]) -> Iterator[None]:
        begin = self._try_record()
        yield
        end = self._try_record()
        if self._anchor is not None and begin is not None and end is not None and len(self._pending) < _MOST_PENDING:
            self._pending.append(_Part(name, self._anchor, begin, end, details))

    def _try_record(self) -> torch.cuda.Event | None:
        if self._is_off:
            return None
        try:
            return _record()
        except RuntimeError as error:
            self._stop(error)
            return None

    def _stop(self, error: RuntimeError) -> None:
        self._is_off = True
        self._pending = []
        logger.warning("the parts of a step are not timed any more: %s", error)


def _record() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(since: torch.cuda.Event, until: torch.cuda.Event) -> float:
    return float(since.elapsed_time(until)) / 1000.0


NO_CLOCK = StepClock(NO_TIMELINE, torch.device("cpu"))
"""Times nothing."""


class Stopwatch:
    """Adds up seconds by what was done in them. What is done inside something else is not counted there.

    Worked example: 5 s of waiting, in the middle of which 2 s go into a push -> {"waiting": 3.0, "pushing": 2.0}.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._running: list[str] = []  # the innermost last
        self._counted_until = clock()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Count the block as `what`."""
        self._count()
        self._running.append(what)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by what was done in them; those in which nothing was named are missing."""
        self._count()
        spent, self._spent = self._spent, {}
        return spent

    def _count(self) -> None:
        now = self._clock()
        if self._running:
            what = self._running[-1]
            self._spent[what] = self._spent.get(what, 0.0) + now - self._counted_until
        self._counted_until = now


_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes(device: torch.device) -> int:
    """Of the GPU what PyTorch has allocated at once; on a CPU the resident memory of the process, its libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
