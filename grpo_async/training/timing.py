"""When the parts of a training step ran (StepClock), what a thread's seconds went into (Stopwatch), and the peak of memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from grpo_async.tracking.timeline import NO_TIMELINE, Timeline

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


class StepClock:
    """Times the parts of a step for the timeline. Used by the training thread.

    CPU: by the wall clock. GPU: the host runs ahead of it, so a part is timed by a pair of CUDA events, in the track "gpu". Nothing
    waits for them: they are read when the host has waited for the GPU anyway (`synchronised`), and an event that the GPU passed at
    that moment ties its clock to the host's. (torch.profiler.record_function would name the parts for a profiler alone.)

    Args:
        device: where the step runs.
    """

    def __init__(self, timeline: Timeline, device: torch.device) -> None:
        self._timeline = timeline
        self._is_off = timeline is NO_TIMELINE
        self._is_on_gpu = device.type == "cuda" and not self._is_off
        # an event, and the host's time when it was recorded: the GPU had nothing to do then, and passed it at once
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, str, dict[str, Any]]] = []  # begin, end

    def part(self, name: str, **details: Any) -> AbstractContextManager[object]:
        """`with clock.part("forward"): ...`; never waits for the GPU."""
        if self._is_off:
            return nullcontext()
        if self._is_on_gpu:
            return self._on_gpu(name, details)
        return self._timeline.span(name, "trainer", **details)

    def synchronised(self) -> None:
        """The host has just read a result of the GPU, which so has done all before it. Also before the first part."""
        if not self._is_on_gpu:
            return
        waiting = []
        for begin, end, name, details in self._pending:
            if self._anchor is None:
                continue
            if end.query():  # type: ignore[no-untyped-call]
                event, at = self._anchor
                start, stop = (at + event.elapsed_time(each) / 1000.0 for each in (begin, end))
                self._timeline.add(name, "gpu", start, stop, **details)
            else:  # recorded after that result was on its way
                waiting.append((begin, end, name, details))
        if not waiting:  # what waits is read against the anchor that it was recorded after
            self._anchor = _record(), time.time()
        self._pending = waiting

    @contextmanager
    def _on_gpu(self, name: str, details: dict[str, Any]) -> Iterator[None]:
        begin = _record()
        yield
        self._pending.append((begin, _record(), name, details))


def _record() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


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


def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank has taken so far: of the GPU what PyTorch has allocated at once; on a CPU the resident memory
    of the process, its libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
