"""When the parts of a training step ran, for the timeline.

CPU: by the wall clock. GPU: the host runs ahead of it, so a part is timed by a pair of CUDA events, in the lane "gpu". Nothing
waits for them: they are read when the host has waited for the GPU anyway (`synchronised`), and an event that the GPU passed at that
moment ties its clock to the host's.

Invariant: nothing here raises. An event that the GPU has not passed yet is read the next time; where CUDA refuses, the clock stops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
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
