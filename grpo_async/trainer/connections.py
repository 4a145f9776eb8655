"""Connects rank 0 (or a standalone evaluation) to the inference servers: the fleet, its listeners, and the client."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.errors import InferenceError
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.fleet import Fleet, Server, ServerState
from grpo_async.inference.router import Servers
from grpo_async.inference.token import token_from_environment
from grpo_async.processes.control import ControlClient
from grpo_async.tracking.timeline import record
from grpo_async.utils.retry import RetryPolicy

_MIN_INTERVAL_S = 1.0


def open_fleet(
    config: ExperimentConfig,
    urls: Sequence[str],
    control: ControlClient,
    stack: ExitStack,
) -> Fleet:
    """The fleet of servers at `urls`, not watched yet (`start`). It asks the launcher to restart the launcher's own servers and
    listens for their restarts; it reports the state and the load of all servers to the launcher. `stack` closes it."""
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
    control.listen(fleet.on_server_event)
    # the launcher itself reports changes of its own servers
    reporter = FleetReporter(fleet, control, tells_changes=bool(inference.urls))
    fleet.subscribe(reporter.on_change)
    fleet.subscribe_info(reporter.on_load)
    stack.callback(reporter.close)
    reporter.on_change()  # their starts begin now
    return fleet


def has_died(fleet: Fleet, server: Server) -> bool:
    """Whether a server has died since its record was read, even if the fleet has not noticed it yet."""
    if all(server.instance_id != other.instance_id for other in fleet.serving()):
        return True
    try:
        return server.control.heartbeat().instance_id != server.instance_id
    except InferenceError:
        fleet.suspect(server.index)
        return True


def make_client(config: ExperimentConfig, servers: Servers, *, vocab_size: int) -> InferenceClient:
    """The client that sends rollouts' requests to `servers`; `vocab_size`: rows of the policy's embedding."""
    inference = config.inference
    return InferenceClient(
        servers,
        token=token_from_environment(),
        request_timeout_s=inference.request_timeout_s,
        wait_timeout_s=inference.longest_outage_s,
        progress_timeout_s=min(config.training.queue_timeout_s, config.training.stall_timeout_s),
        retry=RetryPolicy(max_retries=inference.max_retries),
        vocab_size=vocab_size,
    )


class FleetReporter:
    """Reports the fleet's changes, on any thread. The launcher gets the state of all servers, at once when one changes, otherwise
    at most once per second, and a note for each change if `tells_changes`. The timeline gets a span for each state of a server.
    """

    def __init__(self, fleet: Fleet, control: ControlClient, *, tells_changes: bool) -> None:
        self._fleet = fleet
        self._control = control
        self._tells_changes = tells_changes
        self._told_at = 0.0
        self._since: dict[int, tuple[ServerState, float]] = {}  # by server: its state, and when the state began
        self._lock = threading.Lock()

    def on_change(self) -> None:
        with self._lock:
            servers = self._fleet.servers()
            for server in servers:
                before = self._since.get(server.index)
                if before is None or before[0] is not server.state:
                    self._end(server.index)
                    self._begin(server, servers, is_first=before is None)
            self._told_at = time.monotonic()
            self._control.send("servers", servers=[self._describe(server) for server in servers])

    def on_load(self) -> None:
        if time.monotonic() - self._told_at >= _MIN_INTERVAL_S:
            self.on_change()

    def close(self) -> None:
        with self._lock:
            for index in list(self._since):
                self._end(index)

    def _begin(self, server: Server, servers: Sequence[Server], *, is_first: bool) -> None:
        state, why = server.state, self._fleet.last_message(server.index)
        self._since[server.index] = state, time.time()
        is_lost = state in (ServerState.DOWN, ServerState.GONE)
        now = time.time()
        record(str(state), now, now, server=server.index, **({"reason": why} if is_lost else {}))
        texts = {ServerState.SERVING: "serves", ServerState.GONE: f"is given up: {why}"}
        if not is_first:  # at first a server may not be up yet
            texts[ServerState.DOWN] = f"is down: {why}"
        if self._tells_changes and state in texts:
            serving = sum(each.state is ServerState.SERVING for each in servers)
            count = f"{serving} of {len(servers)} servers serve"
            self._control.send("warning" if is_lost else "note", text=f"{server.name} {texts[state]}; {count}")

    def _end(self, index: int) -> None:
        if (before := self._since.pop(index, None)) is not None:
            record(str(before[0]), before[1], time.time(), server=index)

    def _describe(self, server: Server) -> dict[str, Any]:
        described = {
            "index": server.index,
            "url": server.url,
            "state": str(server.state),
            "restarts": self._fleet.restarts(server.index),
            "reason": "" if server.state.is_up else self._fleet.last_message(server.index),
        }
        if (info := self._fleet.current_info(server.index)) is not None:
            described |= {
                "version": info.policy_version,
                "running": info.running_requests,
                "waiting": info.waiting_requests,
                "max_running": info.max_running_requests,
                "kv_usage": info.kv_usage,
            }
        return described
