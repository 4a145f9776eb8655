"""The inference servers of a run: which of them are up, which serve the current weights, how failed ones come back.

    trainer (this file)                                  launcher (launch.servers)

    STARTING                                         <-- "starting"
       | healthy                                          |
    READY                                                 |
       | weights pushed: mark_serving                --> server_serving
    SERVING                                               |
                                                     <-- "exited": the process has ended; before it ever served, the run ends
    DOWN   fenced, from any of the above: dead,      --> restart_server: it is killed with all its processes
       |   hung, a push failed                            | a wait, then it is started again: "starting"
       |-- healthy, a new instance: READY                 |
    GONE                                             <-- "given_up": too many restarts in a row; without another the run ends

Every start of a server is an instance, with a random `instance_id`. A server of this run comes back only as a new instance: one
that hung must not come back if it wakes before it is killed. A server that others run comes back when it answers again, after a
while if it failed several times without having served. A daemon thread polls each server, and fences it by the rules of `_judge`.

Invariant: a server is SERVING only if its current instance has the current weights. A record (`Server`) describes one instance;
calls with an outdated record change nothing. All methods are thread-safe; listeners are called outside the lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from statistics import fmean
from typing import Any, Literal

import httpx

from grpo_async.config.sections import MAX_RESTART_DELAY_S, InferenceSection
from grpo_async.errors import BadResponseError, DeadlineError, InferenceError, RequestRejectedError, RunError
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.connect import is_answer
from grpo_async.inference.control import ServerControl
from grpo_async.inference.router import ANY_VERSION, ServerAddress
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.retry import backoff_s

logger = logging.getLogger(__name__)

_INFO_TIMEOUT_S = 2.0
_MAX_INFOS = 1000
_STOP_INTERVAL_S = 0.2
_STARTING_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 10.0  # of a request to a server that is not up, and of /health after a failed heartbeat
_CLOSE_TIMEOUT_S = 1.0

ServerEvent = Literal["exited", "starting", "given_up"]  # what the launcher reports about the process of a server


class ServerState(StrEnum):
    """See the module's docstring."""

    STARTING = "starting"  # has not answered yet, or was started again
    READY = "ready"  # healthy, with old weights or those of its checkpoint
    SERVING = "serving"  # has the current weights; gets requests
    DOWN = "down"  # fenced
    GONE = "gone"  # given up

    @property
    def is_up(self) -> bool:
        """Whether weights can be pushed to it."""
        return self in (ServerState.READY, ServerState.SERVING)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Server(ServerAddress):
    """One server at one moment, as the instance `instance_id` (empty while it is unknown). Every change of state makes a new
    record, so the same record means that nothing has changed."""

    control: ServerControl
    state: ServerState
    since: float  # when the record was made, on the monotonic clock
    info: ServerInfo | None = None  # its report when it became READY


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailure:
    """A server that was fenced. Everything that happens to it until it serves again is one failure."""

    index: int
    name: str
    reason: str
    at: float  # on the monotonic clock
    recovery_s: float | None = None  # seconds until it served again


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Counters since the run began to watch. Neither ever decreases.

    One of two servers was busy for 10 s and made 500 tokens, died, and has now been busy for 2 s with 90 tokens; the other was
    busy for 11 s with 600: busy_s = (10 + 2 + 11) / 2 = 11.5, generated_tokens = 500 + 90 + 600 = 1190.
    """

    busy_s: float  # in which a server was generating, averaged over all servers of the run
    generated_tokens: int  # of all servers together


@dataclass(slots=True, kw_only=True)
class _Tracked:
    """One server over all its instances. The fleet's lock is held while fields change, except for the last three."""

    server: Server
    last_instance_id: str = ""
    last_message: str = "never answered"  # its last answer, or why it cannot be reached
    failures: list[ServerFailure] = field(default_factory=list)
    num_restarts: int = 0
    num_failed: int = 0  # since it last served
    exit_message: str = ""  # the launcher has seen its process end, and restarts it by itself
    last_info: ServerInfo | None = None
    recent_infos: list[ServerInfo] = field(default_factory=list)  # since the last `Fleet.metrics`
    counters: dict[str, tuple[float, int]] = field(default_factory=dict)  # busy seconds and tokens, by instance
    ask_now: threading.Event = field(default_factory=threading.Event)  # ends the wait for its next heartbeat
    errors_since: float | None = None  # when heartbeats began to return errors
    is_silent: bool = False  # its last request was not answered

    @property
    def current_info(self) -> ServerInfo | None:
        """Its latest report; None when it is not up."""
        is_current = self.last_info is not None and self.last_info.instance_id == self.server.instance_id
        return self.last_info if is_current and self.server.state.is_up else None

    def note(self, info: ServerInfo) -> None:
        """Keep a new report. Answers may arrive out of order: no counter goes back to an older value."""
        self.last_info = info
        self.recent_infos = [*self.recent_infos, info][-_MAX_INFOS:]
        busy_s, tokens = self.counters.get(info.instance_id, (0.0, 0))
        self.counters[info.instance_id] = max(busy_s, info.busy_s), max(tokens, info.generated_tokens)


class Fleet:
    """See the module's docstring; also `router.Servers`. A url is empty for a server that has no place yet: "starting" brings it.
    `ask_restart` is called with index and reason to have a server restarted; None: others run the servers."""

    def __init__(
        self,
        urls: Sequence[str],
        inference: InferenceSection,
        *,
        token: str | None,
        control_timeout_s: float,
        ask_restart: Callable[[int, str], None] | None = None,
    ) -> None:
        self._inference = inference
        self._ask_restart = ask_restart
        self._tracked = []
        self._token = token
        self._control_timeout_s = control_timeout_s
        for index, url in enumerate(urls):
            server = Server(
                index=index,
                **self._at(index, url),
                state=ServerState.STARTING if url else ServerState.DOWN,
                since=time.monotonic(),
            )
            message = "never answered" if url else "there is no room for it in the cluster yet"
            self._tracked.append(_Tracked(server=server, last_message=message))
        self._listeners: list[Callable[[], None]] = []
        self._info_listeners: list[Callable[[], None]] = []
        self.num_changes = 0
        self.versions = ANY_VERSION  # see `router.Servers`; set by the trainer
        self._num_loading = 0  # pushes in phases in which engines receive and load
        self._loaded_at = -math.inf
        self._busy_s = self._counted_busy_s = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def _at(self, index: int, url: str) -> dict[str, Any]:
        """The fields of a server at an address."""
        name = f"server {index} ({url})" if url else f"server {index}"
        control = ServerControl(url, token=self._token, timeout_s=self._control_timeout_s, name=name)
        return {"name": name, "url": url, "control": control}

    def start(self) -> None:
        """Begin to watch the servers."""
        now = time.monotonic()
        with self._lock:
            for tracked in self._tracked:
                tracked.server = replace(tracked.server, since=now)
        for index in range(len(self._tracked)):
            thread = threading.Thread(target=self._watch, args=(index,), name="server-monitor", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop watching and close every connection; takes about a second at most."""
        self._is_closed = True
        for tracked in self._tracked:
            tracked.ask_now.set()
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for server in self.servers():
            server.control.close()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change of state, from the thread that made it; it must be quick and must not raise."""
        self._listeners.append(listener)

    def subscribe_info(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every answered heartbeat, from the thread of its server; it must be quick and must not raise."""
        self._info_listeners.append(listener)

    # ---- state ----

    def server(self, index: int) -> Server:
        with self._lock:
            return self._tracked[index].server

    def servers(self) -> list[Server]:
        with self._lock:
            return [tracked.server for tracked in self._tracked]

    def servers_up(self) -> list[Server]:
        """Servers that are up: weights can be pushed to them."""
        return [server for server in self.servers() if server.state.is_up]

    def serving(self) -> list[Server]:
        """Servers that have the current weights: requests go to them."""
        return [server for server in self.servers() if server.state is ServerState.SERVING]

    @property
    def has_ready(self) -> bool:
        """Whether some server is up without the current weights."""
        return any(server.state is ServerState.READY for server in self.servers())

    def current_info(self, index: int) -> ServerInfo | None:
        """The latest report of a server that is up; None if it is not up."""
        with self._lock:
            return self._tracked[index].current_info

    def restarts(self, index: int) -> int:
        return self._tracked[index].num_restarts

    def last_message(self, index: int) -> str:
        return self._tracked[index].last_message

    @property
    def failures(self) -> list[ServerFailure]:
        with self._lock:
            failures = [failure for tracked in self._tracked for failure in tracked.failures]
        return sorted(failures, key=lambda failure: failure.at)

    def metrics(self) -> dict[str, float]:
        """The metrics servers/*. `recovery_s` is that of the failure that ended last, and absent before one has. `running` and
        `waiting` are summed over the servers that are up, and `kv_usage` is averaged, each from the answers since the last call;
        they are absent if no server reports them."""
        failures = self.failures
        metrics = {"servers/serving": float(len(self.serving())), "servers/failures": float(len(failures))}
        recoveries = [(each.at + each.recovery_s, each.recovery_s) for each in failures if each.recovery_s is not None]
        if recoveries:
            metrics["servers/recovery_s"] = max(recoveries)[1]
        with self._lock:
            metrics["servers/restarts"] = float(sum(tracked.num_restarts for tracked in self._tracked))
            infos = [tracked.recent_infos or [info] for tracked in self._tracked if (info := tracked.current_info)]
            for tracked in self._tracked:
                tracked.recent_infos = []
        if infos:
            metrics["servers/running"] = sum(fmean(info.running_requests for info in each) for each in infos)
            metrics["servers/waiting"] = sum(fmean(info.waiting_requests for info in each) for each in infos)
        if usages := [info.kv_usage for each in infos for info in each if info.kv_usage is not None]:
            metrics["servers/kv_usage"] = fmean(usages)
        return metrics

    def read_counters(self) -> ServerCounters:
        """The servers' counters since the fleet was started. Asks the servers that are up, for at most 4 s; a server that does not
        answer counts with its last answer."""
        asked = {
            server.index: in_thread(
                partial(server.control.info, timeout_s=_INFO_TIMEOUT_S, retries=0), name="server-info"
            )
            for server in self.servers_up()
            if not self._tracked[server.index].is_silent  # until its next heartbeat
        }
        answered = wait(asked.values(), timeout=2 * _INFO_TIMEOUT_S).done
        infos: dict[int, ServerInfo] = {}
        for index, question in asked.items():
            if question in answered and question.exception() is None:
                infos[index] = question.result()
            else:
                self._tracked[index].is_silent = True
        with self._lock:
            for index, info in infos.items():
                self._tracked[index].note(info)
            counted = [counters for tracked in self._tracked for counters in tracked.counters.values()]
            busy_s = sum(busy_s for busy_s, _ in counted)
            num_placed = sum(bool(tracked.server.url) for tracked in self._tracked)
            self._busy_s += (busy_s - self._counted_busy_s) / max(1, num_placed)
            self._counted_busy_s = busy_s
        return ServerCounters(
            busy_s=self._busy_s,
            generated_tokens=sum(tokens for _, tokens in counted),
        )

    def wait_until_up(
        self, *, stop: threading.Event, deadline_s: float, heartbeat: Callable[[], object] = lambda: None
    ) -> bool:
        """Wait until a server is up; False if `stop` was set meanwhile. `heartbeat` is called several times a second. RunError: all
        servers were given up."""
        ends_at = time.monotonic() + deadline_s
        while not stop.is_set():
            self.check_any_left()
            with self._lock:
                if any(tracked.server.state.is_up for tracked in self._tracked):
                    return True
                described = self._describe()
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(
                        f"an inference server to be up ({described})",
                        waited_s=deadline_s,
                        setting="inference.startup_timeout_s",
                        hint="See the servers' logs.",
                    )
                self._changed.wait(min(left_s, _STOP_INTERVAL_S))  # `stop` ends it, too, but a wait has only one event
            heartbeat()
        return False

    def check_any_left(self) -> None:
        """Raise RunError when all servers were given up."""
        with self._lock:
            if all(tracked.server.state is ServerState.GONE for tracked in self._tracked):
                raise RunError(f"every inference server was given up: {self._describe()}")

    def _describe(self) -> str:
        return "; ".join(f"{each.server.name} is {each.server.state}: {each.last_message}" for each in self._tracked)

    # ---- calls of the trainer ----

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """A context in which servers receive and load weights: a silent engine is not fenced then, because it is busy, and the push
        has its own deadlines. A refused connection still counts."""
        with self._lock:
            self._num_loading += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_loading -= 1
                self._loaded_at = time.monotonic()

    def mark_serving(self, servers: Sequence[Server], *, version: int) -> list[Server]:
        """The instances in these records have the weights of `version`, so they get requests. Returns those that did not
        serve before."""
        new: list[Server] = []
        with self._changing() as changed:
            for server in servers:
                tracked = self._tracked[server.index]
                if tracked.server.state is not ServerState.READY or tracked.server.instance_id != server.instance_id:
                    continue
                self._set(tracked, changed, state=ServerState.SERVING)
                new.append(tracked.server)
                tracked.num_failed = 0
                since = ""
                if tracked.failures and tracked.failures[-1].recovery_s is None:
                    recovery_s = time.monotonic() - tracked.failures[-1].at
                    tracked.failures[-1] = replace(tracked.failures[-1], recovery_s=recovery_s)
                    since = f", {recovery_s:.1f} s after it failed"
                logger.info("%s serves version %d%s", server.name, version, since)
        return new

    def fence(self, server: Server, reason: str) -> None:
        """Fence this instance of a server; it is restarted, or watched until it returns."""
        current = self.server(server.index)
        if current.instance_id == server.instance_id:
            self._fence(current, reason)

    def give_up(self, server: Server, reason: str) -> None:
        """Never use this server again."""
        with self._changing() as changed:
            tracked = self._tracked[server.index]
            if tracked.server.state is not ServerState.GONE:
                tracked.last_message = reason
                self._set(tracked, changed, state=ServerState.GONE)

    def suspect(self, index: int) -> None:
        """A request to this server failed: check it now, not only at its next heartbeat."""
        self._tracked[index].ask_now.set()

    def on_server_event(self, message: Mapping[str, Any]) -> None:
        """{"kind": "server_event", "index": 0, "event": a ServerEvent, "detail": "..."}, with "url" where its address has changed.
        "exited" only makes the watcher check at once: the server may be up again before the message is read."""
        index, event, detail = int(message["index"]), message["event"], str(message.get("detail", ""))
        tracked = self._tracked[index]
        if event == "given_up":
            self.give_up(tracked.server, detail)
        elif event == "exited":
            with self._lock:
                tracked.exit_message = tracked.last_message = detail or "its process ended"
            self.suspect(index)
        else:
            url = message.get("url", tracked.server.url)
            if url != tracked.server.url:
                if tracked.server.url:  # on another node than before
                    self._fence(tracked.server, detail, ask=False)
                with self._changing() as changed:
                    self._set(tracked, changed, **self._at(index, url))
            with self._changing() as changed:
                tracked.exit_message = ""
                if tracked.server.state in (ServerState.DOWN, ServerState.STARTING):
                    self._set(tracked, changed, state=ServerState.STARTING, info=None, instance_id="")
            self.suspect(index)

    # ---- the watcher of each server ----

    def _watch(self, index: int) -> None:
        ask_now = self._tracked[index].ask_now
        while True:  # `close` ends it, or the process
            ask_now.clear()
            server = self.server(index)
            if self._is_closed or server.state is ServerState.GONE:
                return
            try:
                if server.state.is_up:
                    self._heartbeat(server)
                elif server.url:
                    self._search(server)
            except Exception:  # if the watcher ended, a dead server would go unnoticed
                if not self._is_closed:
                    logger.exception("checking %s failed; it will be checked again", server.name)
            interval_s = self._inference.heartbeat_interval_s
            if self.server(index).state is ServerState.STARTING:
                interval_s = min(interval_s, _STARTING_INTERVAL_S)
            ask_now.wait(interval_s)

    def _search(self, server: Server) -> None:
        """Check a server that is not up."""
        is_healthy = False
        try:
            server.control.health(timeout_s=_PROBE_TIMEOUT_S)
            is_healthy = True
            info = server.control.heartbeat(timeout_s=_PROBE_TIMEOUT_S)
        except InferenceError as error:
            if self._is_closed:
                return
            if hopeless := why_hopeless(error, is_healthy=is_healthy):
                self.give_up(server, hopeless)
            else:
                self.not_found(server, str(error))
        else:
            self._forget_errors(server)
            self.found(server, info)

    def _heartbeat(self, server: Server) -> None:
        asked_at = time.monotonic()
        try:
            info = server.control.heartbeat(timeout_s=self._inference.heartbeat_timeout_s)
        except InferenceError as error:
            if not self._is_closed:
                self._judge(server, error, asked_at)
            return
        self._forget_errors(server)
        if info.instance_id != server.instance_id:
            self.restarted(server, info)
        elif not self._is_closed:
            self.note(server, info)

    def _judge(self, server: Server, error: InferenceError, asked_at: float) -> None:
        """Decide whether a failed heartbeat fences the server."""
        timeout_s, tracked = self._inference.heartbeat_timeout_s, self._tracked[server.index]
        if isinstance(error.__cause__, httpx.TimeoutException):
            tracked.is_silent = True
            if not self._has_loaded_since(asked_at):
                self._fence(server, f"its engine did not answer for {timeout_s:g} s (inference.heartbeat_timeout_s)")
            return
        if not is_answer(error):
            self._fence(server, f"its connection was lost: {error}")
            return
        try:
            server.control.health(timeout_s=_PROBE_TIMEOUT_S)
        except InferenceError as death:
            if is_answer(death):  # without any answer, the next heartbeat decides
                self._fence(server, str(death))
                return
        now = time.monotonic()
        since = tracked.errors_since = tracked.errors_since or now
        if now - since > timeout_s and not self._has_loaded_since(asked_at):
            self._fence(server, f"its engine has answered with errors for {now - since:.0f} s: {error}")

    def _forget_errors(self, server: Server) -> None:
        tracked = self._tracked[server.index]
        tracked.is_silent, tracked.errors_since = False, None

    def _has_loaded_since(self, moment: float) -> bool:
        """Whether servers were loading weights at any time since `moment`, on the monotonic clock."""
        with self._lock:
            return self._num_loading > 0 or self._loaded_at >= moment

    # ---- results of a watcher; outdated records are ignored ----

    def note(self, server: Server, info: ServerInfo) -> None:
        with self._lock:
            self._tracked[server.index].note(info)
        for listener in self._info_listeners:
            listener()

    def found(self, server: Server, info: ServerInfo) -> None:
        """A server that was not up has answered."""
        with self._changing() as changed:
            tracked = self._tracked[server.index]
            if server is not tracked.server:
                return
            why_not = self._why_not_back(tracked, info.instance_id)
            if not why_not:
                if tracked.last_instance_id not in ("", info.instance_id):
                    tracked.num_restarts += 1
                tracked.last_instance_id, tracked.last_message, tracked.exit_message = info.instance_id, "up", ""
                tracked.note(info)
                self._set(tracked, changed, state=ServerState.READY, info=info, instance_id=info.instance_id)
                logger.info("%s is up", server.name)
        if why_not:
            self.not_found(server, why_not)

    def not_found(self, server: Server, reason: str) -> None:
        """A server that was not up has not answered."""
        with self._lock:
            tracked = self._tracked[server.index]
            if server is not tracked.server:
                return
            tracked.last_message = reason
        timeout_s = self._inference.startup_timeout_s
        if server.state is ServerState.STARTING and time.monotonic() - server.since > timeout_s:
            self._fence(server, f"it is not up within inference.startup_timeout_s = {timeout_s:g} s: {reason}")

    def restarted(self, server: Server, info: ServerInfo) -> None:
        """The server answers as a new instance."""
        is_of_others = self._ask_restart is None
        reason = "it was restarted, or several servers share its address" if is_of_others else "it was restarted"
        self._fence(server, reason, ask=False)
        self.found(self.server(server.index), info)

    def _fence(self, server: Server, reason: str, *, ask: bool = True) -> None:
        with self._changing() as changed:
            tracked = self._tracked[server.index]
            if server is not tracked.server or server.state in (ServerState.DOWN, ServerState.GONE):
                return
            if tracked.exit_message:  # the launcher has noticed that it ended, and restarts it by itself
                reason, ask = f"{tracked.exit_message} ({reason})", False
            tracked.last_message = reason
            tracked.num_failed += 1
            self._set(tracked, changed, state=ServerState.DOWN)
            if not tracked.failures or tracked.failures[-1].recovery_s is not None:
                failure = ServerFailure(index=server.index, name=server.name, reason=reason, at=tracked.server.since)
                tracked.failures.append(failure)
        logger.warning("%s is down: %s", server.name, reason)
        if ask and self._ask_restart is not None:
            self._ask_restart(server.index, reason)

    def _why_not_back(self, tracked: _Tracked, instance_id: str) -> str:
        """Why a server that answers does not count as up; "" if it does."""
        server = tracked.server
        if self._ask_restart is None:
            wait_s = return_delay_s(tracked.num_failed)
            if time.monotonic() - server.since >= wait_s:
                return ""
            return f"it failed {tracked.num_failed} times in a row, so it is retried after {wait_s:.0f} s"
        if server.state is ServerState.STARTING:  # the launcher has just started it
            is_new = instance_id != tracked.last_instance_id or not instance_id
        else:
            is_new = bool(tracked.last_instance_id and instance_id) and instance_id != tracked.last_instance_id
        return "" if is_new else "it has not been restarted since it failed"

    # ---- changes of state ----

    @contextmanager
    def _changing(self) -> Iterator[list[int]]:
        """Hold the lock; after its release, notify all listeners of the servers in the list."""
        changed: list[int] = []
        with self._lock:
            yield changed
        if changed:
            for index in changed:
                self._tracked[index].ask_now.set()
            for listener in self._listeners:
                listener()

    def _set(self, tracked: _Tracked, changed: list[int], **fields: Any) -> None:
        """The only place where a server's state changes; called with the lock held."""
        tracked.server = replace(tracked.server, since=time.monotonic(), **fields)
        self.num_changes += 1
        changed.append(tracked.server.index)
        self._changed.notify_all()


def why_hopeless(error: InferenceError, *, is_healthy: bool) -> str:
    """What to change if asking again is useless; "" otherwise. `is_healthy`: the server says that it can generate."""
    if isinstance(error, RequestRejectedError) and error.status in (401, 403):
        return f"{error}: set the variable {TOKEN_VARIABLE} to the token that this server was started with"
    is_unknown = isinstance(error, RequestRejectedError) and error.status in (404, 405)
    if is_healthy and (is_unknown or isinstance(error, BadResponseError)):
        return f"it is not a server of grpo-async ({error}); start it with `grpo-async serve-vllm CONFIG`, not with `vllm serve`"
    return (
        f"{error}; $SSL_CERT_FILE names the trusted certificates" if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""
    )


def return_delay_s(num_failed: int) -> float:
    """How long a server that others run is left alone: 0 after the first failure, then 2, 4, 8, ... 60 s."""
    return 0.0 if num_failed < 2 else backoff_s(num_failed - 2, 2.0, MAX_RESTART_DELAY_S)
