"""When the parts of a training step ran (StepClock), what the main thread does (Activity), and the peak of memory."""

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
    waits for them: they are read when the host has waited for the GPU anyway (`synchronized`), and an event that the GPU passed at
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

    def synchronized(self) -> None:
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


class Activity:
    """What a thread does: shown by `str`, recorded in the timeline, and its seconds added up by kind. Written by that
    thread, read by any.

    Worked example: 5 s of the kind "waiting", in the middle of which 2 s are "pushing" -> {"waiting": 3.0, "pushing": 2.0}.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, timeline: Timeline = NO_TIMELINE, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeline = timeline
        self._clock = clock
        self._now = "starting", clock()
        self._kinds: list[str] = []  # of the current blocks, the innermost last
        self._spent: dict[str, float] = {}
        self._counted_until = clock()
        self.num_begun = 0
        """Grows with everything that begins but pushes: those to servers that come and go are no progress."""

    def begin(self, what: str) -> None:
        """From now on the thread is `what` ("evaluating after training")."""
        self._now = what, self._clock()
        self.num_begun += 1

    @contextmanager
    def during(self, what: str, span: str, kind: str, **details: int) -> Iterator[None]:
        """The thread is `what` in this block, `span` in the timeline; afterward what it was before, for as long as it was."""
        before = self._now
        self._count()
        self._now = what, self._clock()
        self.num_begun += kind != "pushing"
        self._kinds.append(kind)
        try:
            with self._timeline.span(span, "trainer", **details):
                yield
        finally:
            self._count()
            self._kinds.pop()
            self._now = before

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call, by kind; those outside of all blocks are missing."""
        self._count()
        spent, self._spent = self._spent, {}
        return spent

    def __str__(self) -> str:
        """ "training step 3, for 12 s"."""
        what, since = self._now
        return f"{what}, for {self._clock() - since:.0f} s"

    def _count(self) -> None:
        now = self._clock()
        if self._kinds:
            kind = self._kinds[-1]
            self._spent[kind] = self._spent.get(kind, 0.0) + now - self._counted_until
        self._counted_until = now


def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank has held so far: of the GPU with the cache of PyTorch's allocator; on a CPU the resident
    memory of the process, its libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
