"""The inference servers of a run: which of them are up, which serve the current weights, how those that fail come back.

    server.py    the states of one server, and its history       monitor.py    asks the servers how they are, and judges
    this file    every transition, and who is told

Invariant: only a server that was pushed the current weights in its present life is SERVING. A record (`Server`) is of one life, and
what is said of a record that is not the current one any more changes nothing. A server that this run has started is restarted when
it is fenced (`ask_restart`); one that others run is looked for until it answers again.

All methods may be called from any thread. Listeners are called outside the lock, after every change of state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_async.errors import DeadlineError, RunError
from grpo_async.inference.control import ServerControl
from grpo_async.inference.monitor import Monitor
from grpo_async.inference.server import FleetSettings, History, Server, ServerFailure, ServerState
from grpo_async.inference.surface import ServerInfo

__all__ = ["Fleet", "FleetSettings", "Server", "ServerCounters", "ServerFailure", "ServerState"]

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S = 2.0
_MOST_LOADS = 1000
_STOP_INTERVAL_S = 0.2
_LONGEST_RESTART_DELAY_S = 60.0
"""Between a restart that was asked for and the start, see `inference.restart_delay_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Since the run began to watch. Neither ever becomes smaller."""

    busy_s: float
    """Seconds in which a server was generating, in the mean over all servers of the run; one that is down is not busy."""
    generated_tokens: int
    """Of all servers together."""


class CounterSums:
    """May be used from any thread.

    One of two servers was busy for 10 s and made 500 tokens, died, and has now been busy for 2 s with 90 tokens; the other was
    busy for 11 s with 600: busy_s = (10 + 2 + 11) / 2 = 11.5, generated_tokens = 500 + 90 + 600 = 1190.
    """

    def __init__(self, *, num_servers: int) -> None:
        self._num_servers = num_servers
        self._lock = threading.Lock()
        self._largest: dict[tuple[int, str], tuple[float, int]] = {}  # of each life of each server

    def note(self, index: int, info: ServerInfo) -> None:
        """What server `index` says now; words that come late, after newer ones, change nothing."""
        life = index, info.instance_id
        with self._lock:
            busy_s, tokens = self._largest.get(life, (0.0, 0))
            self._largest[life] = max(busy_s, info.busy_s), max(tokens, info.generated_tokens)

    def total(self) -> ServerCounters:
        """The sums as far as they are known."""
        with self._lock:
            values = list(self._largest.values())
        return ServerCounters(
            busy_s=sum(busy_s for busy_s, _ in values) / self._num_servers,
            generated_tokens=sum(tokens for _, tokens in values),
        )


class Fleet:
    """See the module's docstring; implements monitor.Watched and router.ServingServers.

    Args:
        urls: addresses, one for each server; kept over restarts.
        token: bearer token, or None.
        settings: how servers are watched.
        control_timeout_s: of control calls that name none.
        authority: PEM file of trusted certificates; None: those of the system.
        ask_restart: called with index and reason for a server to be restarted; None: the servers are run by others.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None,
        settings: FleetSettings,
        control_timeout_s: float,
        authority: Path | None = None,
        ask_restart: Callable[[int, str], None] | None = None,
    ) -> None:
        now = time.monotonic()
        names = [f"server {index} ({url})" for index, url in enumerate(urls)]
        self._servers = [
            Server(
                index=index,
                name=name,
                url=url,
                control=ServerControl(
                    url, token=token, timeout_s=control_timeout_s, name=name, authority=authority
                ),
                state=ServerState.STARTING,
                since=now,
            )
            for index, (name, url) in enumerate(zip(names, urls, strict=True))
        ]  # fmt: skip
        self._histories = [History(is_ours=ask_restart is not None) for _ in urls]
        self._settings = settings
        self._ask_restart = ask_restart
        self._counters = CounterSums(num_servers=len(urls))
        self._listeners: list[Callable[[], None]] = []
        self._load_listeners: list[Callable[[], None]] = []
        self._heard: dict[int, ServerInfo] = {}  # the last words of each server
        self._loads: dict[int, list[ServerInfo]] = {}  # and all since `metrics` was called last
        self._worked_at: dict[int, float] = {}  # when a server that starts was last seen to work
        self._num_events = 0
        self._num_applying = 0
        self._num_applied = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._monitor = Monitor(self, urls, token=token, settings=settings, authority=authority)

    def start(self) -> None:
        """Begin to watch the servers."""
        now = time.monotonic()
        with self._lock:
            self._servers = [replace(server, since=now) for server in self._servers]
        self._monitor.start()

    def close(self) -> None:
        """Stop watching and close every connection; takes 10 s at most."""
        self._monitor.close()
        for server in self._servers:
            server.control.close()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change of state, from whichever thread made it; it must be quick and not raise."""
        self._listeners.append(listener)

    def subscribe_load(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every heartbeat that was answered, from the monitor's thread; it must be quick and not raise."""
        self._load_listeners.append(listener)

    # What is there.

    def load(self, index: int) -> ServerInfo | None:
        """What a server that is up said of itself when it was last asked; None of one that is not up."""
        with self._lock:
            return self._load(self._servers[index])

    def _load(self, server: Server) -> ServerInfo | None:
        heard = self._heard.get(server.index)
        is_current = heard is not None and server.state.is_member and heard.instance_id == server.instance_id
        return heard if is_current else None

    def restarts(self, index: int) -> int:
        """New lives of a server that were seen."""
        with self._lock:
            return self._histories[index].num_restarts

    def server(self, index: int) -> Server:
        with self._lock:
            return self._servers[index]

    def servers(self) -> list[Server]:
        """All of them, as they are now."""
        with self._lock:
            return list(self._servers)

    def last_words(self, index: int) -> str:
        """What was last heard of a server that is not up."""
        with self._lock:
            return self._histories[index].last_words

    def members(self) -> list[Server]:
        """Servers that are up: weights can be pushed to them."""
        with self._lock:
            return [server for server in self._servers if server.state.is_member]

    def serving(self) -> list[Server]:
        """Servers that have the current weights: requests go to them."""
        with self._lock:
            return [server for server in self._servers if server.state is ServerState.SERVING]

    @property
    def has_joiners(self) -> bool:
        """Whether some server is up that has not got the current weights."""
        with self._lock:
            return any(server.state is ServerState.READY for server in self._servers)

    @property
    def num_events(self) -> int:
        """Grows with every change of state."""
        with self._lock:
            return self._num_events

    @property
    def failures(self) -> list[ServerFailure]:
        """Every failure so far, in order. What happens to a server until it serves again is one failure."""
        with self._lock:
            return self._failures()

    def _failures(self) -> list[ServerFailure]:
        failures = [failure for history in self._histories for failure in history.failures]
        return sorted(failures, key=lambda failure: failure.at)

    def metrics(self) -> dict[str, float]:
        """`servers/recovery_s` is the last failure's that is over; absent before. running and waiting are sums over the servers
        that are up, kv_usage is their mean; each of all that was heard since the last call; absent where none says it."""
        with self._lock:
            loads = [
                self._loads.get(server.index) or [load] for server in self._servers if (load := self._load(server))
            ]
            self._loads = {}
            metrics = {
                "servers/serving": float(sum(server.state is ServerState.SERVING for server in self._servers)),
                "servers/failures": float(len(self._failures())),
                "servers/restarts": float(sum(history.num_restarts for history in self._histories)),
            }
            over = [failure for failure in self._failures() if failure.recovery_s is not None]
            if over:
                last = max(over, key=lambda failure: failure.at + (failure.recovery_s or 0.0))
                metrics["servers/recovery_s"] = last.recovery_s or 0.0
        if loads:
            metrics["servers/running"] = sum(fmean(info.running_requests for info in each) for each in loads)
            metrics["servers/waiting"] = sum(fmean(info.waiting_requests for info in each) for each in loads)
        if usages := [info.kv_usage for each in loads for info in each if info.kv_usage is not None]:
            metrics["servers/kv_usage"] = fmean(usages)
        return metrics

    def read(self) -> ServerCounters:
        """What the servers have done since the fleet was started. Asks those that are up, 2 s at most; what is not answered
        counts as it was when it was last heard."""
        members = {server.index: server for server in self.members()}
        for index, info in self._monitor.infos(list(members), timeout_s=_READ_TIMEOUT_S).items():
            self._hear(index, info)
        return self._counters.total()

    def wait_for_members(self, *, stop: threading.Event, deadline_s: float, setting: str) -> bool:
        """Until a server is up; False when `stop` was set meanwhile.

        Raises:
            DeadlineError: none within `deadline_s` seconds.
            RunError: all were given up.
        """
        ends_at = time.monotonic() + deadline_s
        with self._lock:
            while not stop.is_set():
                if any(server.state.is_member for server in self._servers):
                    return True
                if all(server.state is ServerState.GONE for server in self._servers):
                    raise RunError("every inference server was given up: " + self._describe())
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(
                        f"an inference server to be up ({self._describe()})",
                        waited_s=deadline_s,
                        setting=setting,
                        hint="Look into the servers' logs.",
                    )
                self._changed.wait(min(left_s, _STOP_INTERVAL_S))  # two things end it, and a wait can be for one only
        return False

    def _describe(self) -> str:
        return "; ".join(
            f"{server.name} is {server.state}: {self._histories[server.index].last_words}" for server in self._servers
        )

    # What the trainer does.

    @contextmanager
    def applying(self) -> Iterator[None]:
        """While servers load the weights that they were sent, a silent engine is not fenced for that: it is busy. A refused
        connection counts as ever."""
        with self._lock:
            self._num_applying += 1
            self._num_applied += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_applying -= 1

    def apply_mark(self) -> int:
        with self._lock:
            return -1 if self._num_applying else self._num_applied

    def applied_since(self, mark: int) -> bool:
        with self._lock:
            return self._num_applying > 0 or self._num_applied != mark

    def mark_serving(self, servers: Sequence[Server], *, version: int) -> None:
        """These have the weights of `version`, in the lives that their records are of; requests may go to them."""
        with self._changing() as changed:
            for server in servers:
                current = self._servers[server.index]
                if current.state is not ServerState.READY or current.instance_id != server.instance_id:
                    continue
                self._set(current, changed, state=ServerState.SERVING)
                recovery_s = self._histories[server.index].serves()
                since = "" if recovery_s is None else f", {recovery_s:.1f} s after it failed"
                logger.info("%s serves version %d%s", current.name, version, since)

    def fence(self, server: Server, reason: str) -> None:
        """Take a server out: it gets no requests, those that it has go elsewhere, and it is restarted or looked for."""
        current = self.server(server.index)
        if current.instance_id == server.instance_id:
            self.lost(current, reason)

    def give_up(self, server: Server, reason: str) -> None:
        """Never use this server again."""
        with self._changing() as changed:
            current = self._servers[server.index]
            if current.state is not ServerState.GONE:
                self._histories[server.index].last_words = reason
                self._set(current, changed, state=ServerState.GONE)

    def suspect(self, index: int) -> None:
        """A request to this server failed: look at it now, not only at its next heartbeat."""
        self._monitor.nudge(index)

    def on_launcher_message(self, message: Mapping[str, Any]) -> None:
        """{"kind": "server", "index": 0, "event": "exited" | "starting" | "working" | "given_up", "detail": "..."}

        Only "starting" and "given_up" change what is known by themselves. "exited" makes the monitor look at once: the server may
        have ended and be up again before the message is read. "working" gives a server that starts more time.
        """
        index, event, detail = int(message["index"]), message["event"], str(message.get("detail", ""))
        if event == "given_up":
            self.give_up(self.server(index), detail)
        elif event == "exited":
            with self._lock:
                self._histories[index].exited(detail or "its process ended")
            self.suspect(index)
        elif event == "working":
            with self._lock:
                self._worked_at[index] = time.monotonic()
        elif event == "starting":
            with self._changing() as changed:
                self._histories[index].starting()
                current = self._servers[index]
                if current.state in (ServerState.DOWN, ServerState.STARTING):
                    self._set(current, changed, state=ServerState.STARTING, info=None, instance_id="")
            self.suspect(index)
        else:
            raise ValueError(f"the launcher said {event!r} of a server; known are exited, starting, working, given_up")

    # What the monitor finds. A record that is not the current one any more is ignored.

    def note(self, server: Server, info: ServerInfo) -> None:
        self._hear(server.index, info)
        for listener in self._load_listeners:
            listener()

    def _hear(self, index: int, info: ServerInfo) -> None:
        self._counters.note(index, info)
        with self._lock:
            self._heard[index] = info
            self._loads[index] = [*self._loads.get(index, []), info][-_MOST_LOADS:]

    def found(self, server: Server, info: ServerInfo) -> None:
        with self._lock:
            why_not = self._histories[server.index].why_not_back(server, info.instance_id)
        if why_not:
            self.not_found(server, why_not)
            return
        with self._changing() as changed:
            if server is not self._servers[server.index]:
                return
            server.control.num_workers = info.num_workers
            self._histories[server.index].up(info.instance_id)
            self._set(server, changed, state=ServerState.READY, info=info, instance_id=info.instance_id)
            logger.info("%s is up", server.name)
        self._hear(server.index, info)

    def not_found(self, server: Server, reason: str) -> None:
        now, limit_s = time.monotonic(), self._settings.startup_timeout_s
        age_s = now - server.since
        with self._lock:
            if server is not self._servers[server.index]:
                return
            self._histories[server.index].last_words = reason
            idle_s = now - max(server.since, self._worked_at.get(server.index, 0.0))
        if server.state is ServerState.STARTING:
            if idle_s > limit_s or age_s > self._settings.longest_startup_s:
                limit = f"inference.startup_timeout_s = {limit_s:g} s"
                works = "" if idle_s > limit_s else f", although it works: it has had {age_s:.0f} s"
                self.lost(server, f"it is not up within {limit}{works}: {reason}")
        elif age_s > limit_s + _LONGEST_RESTART_DELAY_S:
            self._ask_again(server, reason)

    def _ask_again(self, server: Server, reason: str) -> None:
        """A restart was asked for and nothing came of it."""
        with self._lock:
            if self._ask_restart is None or server is not self._servers[server.index]:
                return
            self._servers[server.index] = replace(server, since=time.monotonic())
        self._ask_restart(server.index, reason)

    def restarted(self, server: Server, info: ServerInfo) -> None:
        self._lose(server, "it was restarted", ask=False)
        self.found(self.server(server.index), info)

    def lost(self, server: Server, reason: str) -> None:
        self._lose(server, reason, ask=True)

    def _lose(self, server: Server, reason: str, *, ask: bool) -> None:
        with self._changing() as changed:
            if server is not self._servers[server.index] or server.state in (ServerState.DOWN, ServerState.GONE):
                return
            reason, is_to_be_asked_for = self._histories[server.index].lose(server, reason)
            self._set(server, changed, state=ServerState.DOWN)
        logger.warning("%s is taken out: %s", server.name, reason)
        if ask and is_to_be_asked_for and self._ask_restart is not None:
            self._ask_restart(server.index, reason)

    # Changes of state.

    @contextmanager
    def _changing(self) -> Iterator[list[int]]:
        """Holds the lock; afterwards, and without it, everybody is told of the servers in the list."""
        changed: list[int] = []
        with self._lock:
            yield changed
        if changed:
            for index in changed:
                self._monitor.nudge(index)
            for listener in self._listeners:
                listener()

    def _set(self, server: Server, changed: list[int], **fields: Any) -> None:
        """The one place where a server's state changes; with the lock held."""
        self._servers[server.index] = replace(server, since=time.monotonic(), **fields)
        self._num_events += 1
        changed.append(server.index)
        self._changed.notify_all()
