"""What connects rank 0 (or an evaluation alone) to the inference servers: the fleet, who listens to it, and who sends requests.

Listeners of the fleet: the launcher hears state and load of all servers, and what becomes of those that others run; the
timeline gets a track for each server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import InferenceError
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.fleet import Fleet, Server, ServerState
from grpo_async.inference.router import Servers
from grpo_async.inference.token import token_from_environment
from grpo_async.processes.control import ControlClient
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.utils.retry import RetryPolicy

_MIN_INTERVAL_S = 1.0


def open_fleet(config: ExperimentConfig, urls: Sequence[str], control: ControlClient, stack: ExitStack) -> Fleet:
    """The servers at `urls`, not watched yet (`start`). The launcher is told which of its own to restart, and tells what becomes of
    them; of others it hears what happens. Closed with `stack`."""
    inference = config.inference

    def ask_restart(index: int, reason: str) -> None:
        control.send("restart_server", index=index, reason=reason)

    fleet = Fleet(
        urls,
        inference=inference,
        token=token_from_environment(),
        control_timeout_s=config.weights.timeout_s,
        ask_restart=None if inference.urls else ask_restart,
    )
    stack.callback(fleet.close)
    control.listen(fleet.on_launcher_message)
    publisher = StatusPublisher(fleet, lambda servers: control.send("servers", servers=servers))
    fleet.subscribe(publisher.on_change)
    fleet.subscribe_load(publisher.on_load)
    if inference.urls:  # of its own servers the launcher tells by itself
        fleet.subscribe(StateLogger(fleet, lambda text: control.send("phase", name=text)))
    return fleet


def has_died(fleet: Fleet, server: Server) -> bool:
    """Whether a server has died since its record was read, seen or not."""
    if all(server.instance_id != other.instance_id for other in fleet.serving()):
        return True
    try:
        server.control.is_paused()  # goes through the engine
        return server.control.info().instance_id != server.instance_id
    except InferenceError:
        fleet.suspect(server.index)
        return True


def make_client(config: ExperimentConfig, servers: Servers) -> InferenceClient:
    """Sends rollouts' requests to `servers`."""
    inference = config.inference
    return InferenceClient(
        servers,
        token=token_from_environment(),
        request_timeout_s=inference.request_timeout_s,
        wait_timeout_s=inference.longest_outage_s,
        progress_timeout_s=min(config.training.queue_timeout_s, config.training.stall_timeout_s),
        ca_certs=inference.tls.trusted if inference.tls else None,
        retry=RetryPolicy(max_retries=inference.max_retries),
    )


class StatusPublisher:
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
        if time.monotonic() - self._told_at >= _MIN_INTERVAL_S:
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
            "reason": "" if server.state.is_member else self._fleet.last_message(server.index),
            **known,
        }


class StateLogger:
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
                    self._tell(f"{server.name} is given up: {self._fleet.last_message(server.index)}; {count}")
                elif server.state is ServerState.DOWN and before is not None:
                    self._tell(f"{server.name} is fenced: {self._fleet.last_message(server.index)}; {count}")


class StateSpans:
    """A listener of the fleet: a track for each server, with a span for each state that it was in, and an instant for a change (a
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
            details["reason"] = self._fleet.last_message(server.index)
        self._timeline.instant(str(server.state), f"server/{server.index}", **details)

    def _end(self, index: int) -> None:
        before = self._since.pop(index, None)
        if before is not None:
            state, began = before
            self._timeline.add(str(state), f"server/{index}", began, time.time())


def watch_servers(fleet: Fleet, timeline: Timeline) -> StateSpans:
    """Record the states of the servers from now on; `close` ends what is open."""
    states = StateSpans(fleet, timeline)
    if timeline is not NO_TIMELINE:
        states()
        fleet.subscribe(states)
    return states
