"""A fleet under test, and a record of what it did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpo_async.config.sections import InferenceSection
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.fleet import Fleet, Server, ServerState

LIMIT_S = 100.0  # the machine may be busy; a test fails at the end of it, it does not wait for it


@dataclass(eq=False)
class Watch:
    """A fleet, and what it did."""

    fleet: Fleet
    restarts: list[tuple[int, str]] = field(default_factory=list)  # that were asked for
    states: list[list[ServerState]] = field(default_factory=list)  # of all servers, after each change
    heartbeats: list[Server] = field(default_factory=list)  # that were answered
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds; it is looked at again after every change of state and every heartbeat."""
        with self.changed:
            assert self.changed.wait_for(condition, LIMIT_S), f"waited {LIMIT_S:.0f} s for {what}; states {self.states}"

    def wait_state(self, state: ServerState, index: int = 0) -> Server:
        self.wait(lambda: self.fleet.server(index).state is state, f"server {index} to be {state}")
        return self.fleet.server(index)

    def serve_all(self, version: int = 1) -> list[Server]:
        """As after a first push: wait until all are up, and mark them. The next heartbeat is then an interval away."""
        self.wait(lambda: len(self.fleet.servers_up()) == len(self.states[0]), "all servers to be up")
        self.fleet.mark_serving(self.fleet.servers_up(), version=version)
        for server in self.fleet.serving():
            self.wait(lambda server=server: server in self.heartbeats, "the heartbeat that follows a change")
        return self.fleet.serving()

    def tell(self, event: str, detail: str = "", index: int = 0, **more: str) -> None:
        """A message of the launcher."""
        self.fleet.on_server_event({"kind": "server_event", "index": index, "event": event, "detail": detail, **more})

    def wait_until_up(
        self,
        *,
        deadline_s: float = 60.0,
        stop: threading.Event | None = None,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> bool:
        return self.fleet.wait_until_up(stop=stop or threading.Event(), deadline_s=deadline_s, heartbeat=heartbeat)


@contextmanager
def watched(
    urls: Sequence[str],
    *,
    spawned: bool = True,
    interval_s: float = 0.1,
    timeout_s: float = 20.0,
    startup_timeout_s: float = 60.0,
) -> Iterator[Watch]:
    """A fleet that is started, and closed at the end of the `with` block. By default nothing but a broken connection fences."""
    watch: Watch

    def ask(index: int, reason: str) -> None:
        with watch.changed:
            watch.restarts.append((index, reason))
            watch.changed.notify_all()

    def note() -> None:
        with watch.changed:
            watch.states.append([server.state for server in watch.fleet.servers()])
            watch.changed.notify_all()

    def note_heartbeat(server: Server, info: ServerInfo) -> None:
        Fleet.note(fleet, server, info)
        with watch.changed:
            watch.heartbeats.append(server)
            watch.changed.notify_all()

    inference = InferenceSection(
        heartbeat_interval_s=interval_s,
        heartbeat_timeout_s=timeout_s,
        startup_timeout_s=startup_timeout_s,
    )
    fleet = Fleet(urls, inference, token=None, control_timeout_s=20.0, ask_restart=ask if spawned else None)
    watch = Watch(fleet)
    watch.states.append([ServerState.STARTING] * len(urls))
    fleet.subscribe(note)
    fleet.note = note_heartbeat  # type: ignore[method-assign]
    try:
        fleet.start()
        yield watch
    finally:
        fleet.close()
