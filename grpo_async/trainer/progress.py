"""Tells the launcher when the run makes no progress, and what waits for what (`training.stall_timeout_s`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Self

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import MAX_RESTART_DELAY_S
from grpo_async.inference.fleet import Fleet, Server, ServerState
from grpo_async.processes.control import ControlClient
from grpo_async.processes.heartbeat import write_stacks
from grpo_async.rollout.source import RolloutSource
from grpo_async.trainer.publish import Publisher
from grpo_async.training.pipeline import Activity

logger = logging.getLogger(__name__)

_MAX_INTERVAL_S = 5.0
_LOOKS_PER_TIMEOUT = 10


class StallWatch:
    """A thread of rank 0, for a `with` block that begins when servers serve. It goes on when the main thread hangs in a
    collective, or the rollout thread in a user's function."""

    def __init__(
        self,
        control: ControlClient,
        config: ExperimentConfig,
        *,
        source: RolloutSource,
        publisher: Publisher,
        activity: Activity,
        fleet: Fleet,
    ) -> None:
        self._control = control
        self._config = config
        self._source = source
        self._publisher = publisher
        self._activity = activity
        self._fleet = fleet
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        timeout_s = self._config.training.stall_timeout_s
        interval_s = min(_MAX_INTERVAL_S, timeout_s / _LOOKS_PER_TIMEOUT)
        seen: object = None
        changed_at = slept_at = time.monotonic()
        while not self._ended.wait(timeout=interval_s):  # a daemon thread
            was_stopped = time.monotonic() - slept_at > interval_s + timeout_s / 2  # SIGSTOP: not a stall
            progress = self._progress()
            now = slept_at = time.monotonic()
            if progress != seen or was_stopped or self._is_excused():
                seen, changed_at = progress, now
            unchanged_s = now - changed_at
            if unchanged_s >= timeout_s:
                write_stacks()
                logger.error("where the tasks of the rollout thread wait:\n%s", self._source.task_stacks())
                self._control.send("stalled", text=self._describe(unchanged_s))
                return

    def _progress(self) -> object:
        tokens = self._source.ledger_snapshot()["tokens"]["started"]
        # only the servers know the tokens of evaluations; the end of a run (save, export) shows in what the main thread begins
        return self._publisher.version, tokens, self._fleet.read_counters().generated_tokens, self._activity.num_begun

    def _is_excused(self) -> bool:
        """Whether a server loads or is restarted: nothing else may be able to continue. The fleet has limits for that."""
        longest_s = self._config.inference.startup_timeout_s + MAX_RESTART_DELAY_S
        now = time.monotonic()
        return any(
            server.state in (ServerState.STARTING, ServerState.DOWN) and now - server.since < longest_s
            for server in self._fleet.servers()
        )

    def _describe(self, unchanged_s: float) -> str:
        servers = _servers(self._fleet.servers(), time.monotonic())
        return (
            f"no step was finished and no token generated for {unchanged_s:.0f} s; raise `training.stall_timeout_s` if this is "
            f"expected. The trainer has finished step {self._publisher.version} and is {self._activity}. "
            f"{self._source.describe()}. Servers: {servers}. "
            "The stacks of all threads, and where tasks wait, are in trainer.log."
        )


def _servers(servers: Sequence[Server], now: float) -> str:
    return "; ".join(f"{server.name} has been {server.state} for {now - server.since:.0f} s" for server in servers)
