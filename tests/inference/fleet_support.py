"""A fleet under test, and what it did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_async.inference.fleet import Fleet, FleetSettings, Server, ServerState
from grpo_async.inference.surface import ServerInfo

LIMIT_S = 100.0  # the machine may be busy; a test fails at the end of it, it does not wait for it


class _TellingFleet(Fleet):
    """Also tells of heartbeats that were answered."""

    def __init__(self, *args: Any, on_heartbeat: Callable[[Server], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_heartbeat = on_heartbeat

    def note(self, server: Server, info: ServerInfo) -> None:
        super().note(server, info)
        self._on_heartbeat(server)


@dataclass(eq=False)
class Watch:
    """A fleet with what it has said."""

    fleet: Fleet
    restarts: list[tuple[int, str]] = field(default_factory=list)  # that were asked for
    states: list[list[ServerState]] = field(default_factory=list)  # of all servers, after each change
    heartbeats: list[Server] = field(default_factory=list)  # that were answered
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds; it is looked at again after every change of state."""
        with self.changed:
            assert self.changed.wait_for(condition, LIMIT_S), f"waited {LIMIT_S:.0f} s for {what}; states {self.states}"

    def wait_state(self, state: ServerState, index: int = 0) -> Server:
        self.wait(lambda: self.fleet.server(index).state is state, f"server {index} to be {state}")
        return self.fleet.server(index)

    def serve_all(self, version: int = 1) -> list[Server]:
        """As after a first push: wait until all are up, and mark them. The next heartbeat is then an interval away."""
        self.wait(lambda: len(self.fleet.members()) == len(self.states[0]), "all servers to be up")
        self.fleet.mark_serving(self.fleet.members(), version=version)
        for server in self.fleet.serving():
            self.wait(lambda server=server: server in self.heartbeats, "the heartbeat that follows a change")
        return self.fleet.serving()

    def wait_heartbeats(self, number: int, *, since: int) -> None:
        """Until so many more were answered than the `since` of an earlier moment, which was len(heartbeats)."""
        self.wait(lambda: len(self.heartbeats) >= since + number, f"{number} heartbeats")

    def tell(self, event: str, detail: str = "", index: int = 0) -> None:
        """A message of the launcher."""
        self.fleet.on_launcher_message({"kind": "server", "index": index, "event": event, "detail": detail})


@contextmanager
def watched(
    urls: Sequence[str],
    *,
    spawned: bool = True,
    interval_s: float = 0.1,
    timeout_s: float = 20.0,
    startup_timeout_s: float = 60.0,
    token: str | None = None,
    authority: Path | None = None,
) -> Iterator[Watch]:
    """A fleet that is started, and closed at the end of the `with` block. By default nothing but a broken connection fences."""
    watch: Watch

    def ask(index: int, reason: str) -> None:
        with watch.changed:
            watch.restarts.append((index, reason))
            watch.changed.notify_all()

    def note() -> None:
        with watch.changed:
            watch.states.append([watch.fleet.server(index).state for index in range(len(urls))])
            watch.changed.notify_all()

    def note_heartbeat(server: Server) -> None:
        with watch.changed:
            watch.heartbeats.append(server)
            watch.changed.notify_all()

    fleet = _TellingFleet(
        urls,
        token=token,
        settings=FleetSettings(
            heartbeat_interval_s=interval_s,
            heartbeat_timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            longest_startup_s=6 * startup_timeout_s,
        ),
        control_timeout_s=20.0,
        authority=authority,
        ask_restart=ask if spawned else None,
        on_heartbeat=note_heartbeat,
    )
    watch = Watch(fleet)
    watch.states.append([ServerState.STARTING] * len(urls))
    fleet.subscribe(note)
    try:
        fleet.start()
        yield watch
    finally:
        fleet.close()
