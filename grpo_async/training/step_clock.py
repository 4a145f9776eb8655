"""When the parts of a training step ran, for the timeline.

CPU: by the wall clock. GPU: the host runs ahead of it, so a part is timed by a pair of CUDA events, in the lane "gpu". Nothing
waits for them: they are read when the host has waited for the GPU anyway (`synchronised`), and an event that the GPU passed at that
moment ties its clock to the host's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from grpo_async.timeline import NO_TIMELINE, Timeline

_LANE = "trainer"
_GPU_LANE = "gpu"
_MOST_PENDING = 4096  # parts between two synchronisations; more are left out


class StepClock:
    """Used by the training thread.

    Args:
        device: where the step runs.
    """

    def __init__(self, timeline: Timeline, device: torch.device) -> None:
        self._timeline = timeline
        self._is_on_gpu = device.type == "cuda"
        self._is_off = timeline is NO_TIMELINE
        self._anchor: tuple[torch.cuda.Event, float] | None = (
            None  # an event and the host's time at which it was recorded
        )
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event, dict[str, Any]]] = []

    def part(self, name: str, **details: Any) -> AbstractContextManager[object]:
        """`with clock.part("forward"): ...`; never waits for the GPU."""
        if self._is_off:
            return nullcontext()
        if self._is_on_gpu:
            return self._on_gpu(name, details)
        return self._timeline.span(name, _LANE, **details)

    def synchronised(self) -> None:
        """The GPU has done everything that it was told: the host has just read a result of it. Also before the first part."""
        if self._is_off or not self._is_on_gpu:
            return
        anchor, self._anchor = self._anchor, (_record(), time.time())
        pending, self._pending = self._pending, []
        if anchor is None:
            return
        event, at = anchor
        for name, begin, end, details in pending:
            start, stop = (at + event.elapsed_time(each) / 1000.0 for each in (begin, end))
            self._timeline.add(name, _GPU_LANE, start, stop, **details)

    @contextmanager
    def _on_gpu(self, name: str, details: dict[str, Any]) -> Iterator[None]:
        begin = _record()
        yield
        if self._anchor is not None and len(self._pending) < _MOST_PENDING:
            self._pending.append((name, begin, _record(), details))


def _record() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


NO_CLOCK = StepClock(NO_TIMELINE, torch.device("cpu"))
"""Times nothing."""
