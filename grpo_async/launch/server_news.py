"""Tells the terminal of servers that others run: which are lost, which serve again, how many are left."""

from __future__ import annotations

import threading
from collections.abc import Callable

from grpo_async.inference.fleet import Fleet, ServerState


class ServerNews:
    """A listener of the fleet: says what has changed since it was last called.

    Args:
        tell: gets one line of text; from any thread.
    """

    def __init__(self, fleet: Fleet, tell: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._tell = tell
        self._known: dict[int, ServerState] = {}
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            servers = self._fleet.servers()
            serving = sum(server.state is ServerState.SERVING for server in servers)
            for server in servers:
                before = self._known.get(server.index)
                self._known[server.index] = server.state
                if server.state is before:
                    continue
                count = f"{serving} of {len(servers)} servers serve"
                if server.state is ServerState.SERVING:
                    self._tell(f"{server.name} serves; {count}")
                elif server.state is ServerState.GONE:
                    self._tell(f"{server.name} is given up: {self._fleet.last_words(server.index)}; {count}")
                elif server.state is ServerState.DOWN and before is not None:
                    self._tell(f"{server.name} is lost: {self._fleet.last_words(server.index)}; {count}")
