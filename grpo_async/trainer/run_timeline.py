"""What the timeline has of a run beside its parts: attempts, phases of rank 0, the states of the servers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_async.inference.fleet import Fleet, Server, ServerState
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
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


class ServerStates:
    """A listener of the fleet: a lane for each server, with a span for each state that it was in, and an instant when it changes (a
    span stands in the file when it is over)."""

    def __init__(self, fleet: Fleet, timeline: Timeline) -> None:
        self._fleet = fleet
        self._timeline = timeline
        self._since: dict[int, tuple[ServerState, float]] = {}
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            for server in self._fleet.servers():
                before = self._since.get(server.index)
                if before is None or before[0] is not server.state:
                    self._end(server.index)
                    self._begin(server)

    def close(self) -> None:
        """End the spans that are open."""
        with self._lock:
            for index in list(self._since):
                self._end(index)

    def _begin(self, server: Server) -> None:
        self._since[server.index] = server.state, time.time()
        details = {}
        if server.state in (ServerState.DOWN, ServerState.GONE):
            details["reason"] = self._fleet.last_words(server.index)
        self._timeline.instant(str(server.state), f"server/{server.index}", **details)

    def _end(self, index: int) -> None:
        before = self._since.pop(index, None)
        if before is not None:
            state, began = before
            self._timeline.add(str(state), f"server/{index}", began, time.time())


def watch_servers(fleet: Fleet, timeline: Timeline) -> ServerStates:
    """Record the states of the servers from now on; `close` ends what is open."""
    states = ServerStates(fleet, timeline)
    if timeline is not NO_TIMELINE:
        states()
        fleet.subscribe(states)
    return states
