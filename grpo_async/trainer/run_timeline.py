"""What the timeline has of a run beside its parts: attempts and phases of rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.tracking.timeline import Timeline
from grpo_async.tracking.timeline_file import ATTEMPT

_LANE = "run"


@contextmanager
def attempt(timeline: Timeline, assignment: Assignment) -> Iterator[None]:
    """Mark the beginning of an attempt, and close the timeline when it ends. An attempt that is killed has no span."""
    number = assignment.attempt_dir.resolve().name.removeprefix("attempt_")
    details = {"attempt": number, "process": os.getpid()}
    if assignment.resume_step is not None:
        details["resume_step"] = assignment.resume_step
    timeline.instant(ATTEMPT, _LANE, **details)
    try:
        with timeline.span(ATTEMPT, _LANE, **details):
            yield
    finally:
        timeline.close()


class RunPhases:
    """Tells the launcher what rank 0 does, and the timeline how long it did."""

    def __init__(self, control: ControlClient, timeline: Timeline) -> None:
        self._control = control
        self._timeline = timeline
        self._now: tuple[str, float] | None = None

    def begin(self, name: str) -> None:
        """The phase before is over."""
        self.end()
        self._now = name, time.time()
        self._control.send("phase", name=name)

    def end(self) -> None:
        """No phase goes on. Safe to call twice."""
        if self._now is not None:
            name, began = self._now
            self._timeline.add(name, _LANE, began, time.time())
            self._now = None
