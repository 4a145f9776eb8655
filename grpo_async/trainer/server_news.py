"""Tells the launcher of the servers: state and load of all, and in words what becomes of those that others run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from grpo_async.inference.fleet import Fleet, Server, ServerState

_LEAST_INTERVAL_S = 1.0


class ServerReport:
    """A listener of the fleet: says how all servers are, at once when a state has changed, else once a second at most.

    Args:
        tell: gets one entry for each server; from any thread.
    """

    def __init__(self, fleet: Fleet, tell: Callable[[Sequence[dict[str, Any]]], None]) -> None:
        self._fleet = fleet
        self._tell = tell
        self._told_at = 0.0
        self._lock = threading.Lock()

    def on_change(self) -> None:
        """For `Fleet.subscribe`."""
        with self._lock:
            self._told_at = time.monotonic()
            self._tell([self._describe(server) for server in self._fleet.servers()])

    def on_load(self) -> None:
        """For `Fleet.subscribe_load`."""
        if time.monotonic() - self._told_at >= _LEAST_INTERVAL_S:
            self.on_change()

    def _describe(self, server: Server) -> dict[str, Any]:
        load = self._fleet.load(server.index)
        known = (
            {
                "version": load.policy_version,
                "running": load.running_requests,
                "waiting": load.waiting_requests,
                "max_running": load.max_running_requests,
                "kv_usage": load.kv_usage,
            }
            if load is not None
            else {}
        )
        return {
            "index": server.index,
            "url": server.url,
            "state": str(server.state),
            "restarts": self._fleet.restarts(server.index),
            "words": "" if server.state.is_member else self._fleet.last_words(server.index),
            **known,
        }


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
