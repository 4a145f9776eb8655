"""The inference servers that a run starts, each over all its restarts.

A server that dies or hangs is killed with all its processes and started again. inference.fleet has a diagram of its states, which
says what this module sends and receives. The wait before a restart is `inference.restart_delay_s`, doubled with each further
consecutive restart, a minute at most. The count is reset when a server has served for ten minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from grpo_async.config.sections import MAX_RESTART_DELAY_S, InferenceSection
from grpo_async.display.display import Display
from grpo_async.errors import GrpoAsyncError
from grpo_async.launch.children import Child, end, first_of, kill
from grpo_async.launch.signals import Signals
from grpo_async.utils.concurrency import all_of, in_background
from grpo_async.utils.retry import backoff_s
from grpo_async.utils.text import count

Spawn: TypeAlias = Callable[[int, int], Awaitable[Child]]
"""Starts the process of a server; gets its index, and how often it was restarted."""
TellTrainer: TypeAlias = Callable[..., None]
"""Gets index, event (an inference.fleet.ServerEvent), detail, and the server's num_restarts, each by its name."""

_OWN_END_S = 1.0  # a server that the trainer misses has often ended by itself; the launcher hears of it a moment later
_RESTART_RESET_S = 600.0  # the count of a server that has served for so long is reset


class Servers:
    """The servers `names` of a run, by their index.

    Attributes:
        lost: set when the run cannot continue without its servers; `failure` says why.
        has_served: whether a server has ever served: then there may be steps to save.
    """

    def __init__(
        self,
        inference: InferenceSection,
        names: Sequence[str],
        spawn: Spawn,
        display: Display,
        tell_trainer: TellTrainer,
    ) -> None:
        self.inference, self.spawn, self.display, self.tell_trainer = inference, spawn, display, tell_trainer
        self.is_stopping = False
        self.has_served = False
        self.lost = asyncio.Event()
        self.failure: str | None = None
        self._given_up: list[str] = []  # why
        self._all = [_Server(index, name, self) for index, name in enumerate(names)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the servers, and keep them running while the context is open."""
        works = [server.keep_running() for server in self._all]
        async with in_background(all_of(works), name="servers") as self._keeping:
            yield

    @property
    def children(self) -> list[Child]:
        return [server.child for server in self._all if server.child is not None and server.child.is_running]

    def stop_restarting(self) -> None:
        """The run stops: from now on a server may end."""
        self.is_stopping = True
        self._keeping.cancel()

    async def end(self, signals: Signals) -> None:
        self.stop_restarting()
        await end(self.children, signals)

    def receive(self, message: Mapping[str, Any]) -> None:
        """Handle server_serving or restart_server of the trainer. Those at inference.urls are not ours."""
        if message["index"] >= len(self._all):
            return
        server = self._all[message["index"]]
        if message["kind"] == "server_serving":
            self.has_served = True
            server.mark_serving(message["num_restarts"])
        else:
            server.ask_restart(str(message["reason"]), message["num_restarts"])

    def fail(self, failure: str) -> None:
        """The run cannot continue; the first reason counts."""
        self.failure = self.failure or failure
        self.lost.set()

    def give_up(self, why: str, log_tail: str) -> None:
        """A server does not come back. The run continues as long as there is another."""
        self._given_up.append(why)
        if left := len(self._all) - len(self._given_up):
            self.display.warning(f"{why}; the run continues with {left} of {len(self._all)}")
        else:
            self.fail("\n".join([*self._given_up, log_tail]))


class _Server:
    """One server over all its restarts. Messages from before the last restart are ignored. A server that ends before it ever served
    is taken as unable to start, and ends the run; but not if the trainer asked for its restart, if its node was lost, or if the
    run needs fewer servers and another one serves."""

    def __init__(self, index: int, name: str, servers: Servers) -> None:
        self.name = name
        self.child: Child | None = None
        self._index = index
        self._servers = servers
        self._num_restarts = 0
        self._in_a_row = 0  # restarts, see inference.max_restarts
        self._serving_since: float | None = None
        self._has_served = False
        self._asked = asyncio.Event()
        self._asked_reason = ""

    async def keep_running(self) -> None:
        """Start the server, and again whenever its process ends or the trainer asks for it, until it is lost."""
        servers, inference = self._servers, self._servers.inference
        most, is_elastic = inference.max_restarts, inference.min_replicas < inference.max_replicas
        while True:
            self.child, was_asked = None, False
            try:
                self.child = await servers.spawn(self._index, self._num_restarts)
                how, was_asked = await self._run(self.child)
            except GrpoAsyncError as error:
                how = f"could not be started: {error}"
            is_lost = self.child is not None and self.child.is_lost
            if self._serving_since is not None and time.monotonic() - self._serving_since >= _RESTART_RESET_S:
                self._in_a_row = 0
            self._serving_since = None
            goes_on = self._has_served or was_asked or is_lost or (is_elastic and servers.has_served)
            if goes_on:
                self._tell("exited", how)
            end_of_log = f"the {self.name} {how}"
            if self.child is not None:
                await kill([self.child])
                end_of_log = f"the {self.child.describe_end(how)}"
            if not goes_on:
                servers.fail(end_of_log)
                return
            if is_lost:
                servers.display.warning(f"the {self.name} {how}; it starts again where there is room")
            elif self._in_a_row >= most:
                after = f"after {count(most, 'consecutive restart')} (inference.max_restarts)"
                self._tell("given_up", f"{how}, {after}")
                servers.give_up(f"the {self.name} was given up {after}: it {how}", end_of_log)
                return
            else:
                delay_s = backoff_s(self._in_a_row, inference.restart_delay_s, MAX_RESTART_DELAY_S)
                self._in_a_row += 1
                restart = f"restart {self._in_a_row} of {most}"
                servers.display.warning(f"the {self.name} {how}; {restart} in {delay_s:g} s")
                await asyncio.sleep(delay_s)  # back-off; cancelled when the run stops
            self._num_restarts += 1

    def mark_serving(self, num_restarts: int) -> None:
        """The trainer has brought its weights to this server. `num_restarts`: those that the trainer knew of."""
        if num_restarts != self._num_restarts:
            return
        if num_restarts and self._serving_since is None:
            self._servers.display.note(f"the {self.name} serves again")
        self._has_served, self._serving_since = True, time.monotonic()

    def ask_restart(self, reason: str, num_restarts: int) -> None:
        """The trainer wants a restart. Ignored while one is under way: the trainer may have asked before it heard of that. When the
        run stops, the server is only killed: the trainer may be waiting for it, and has a checkpoint to write."""
        if self.child is None or num_restarts != self._num_restarts:
            return
        if self._servers.is_stopping:
            self.child.kill()
        self._asked_reason = reason
        self._asked.set()

    async def _run(self, child: Child) -> tuple[str, bool]:
        """Wait until the process ends or the trainer asks for a restart; returns what completes "the server ...", and whether the
        trainer has asked."""
        self.name = child.name
        self._asked.clear()
        if self._num_restarts:
            self._servers.display.note(f"the {self.name} starts again (log: {child.log.name})")
        if self._num_restarts or child.url is not None:
            self._tell("starting", f"restart {self._in_a_row}", **({"url": child.url} if child.url else {}))
        await first_of([child.exited], [self._asked])
        if child.is_running:
            await first_of([child.exited], [], _OWN_END_S)
        if child.is_running:
            return f"was killed: {self._asked_reason}", True
        return child.end, False

    def _tell(self, event: str, detail: str, **more: str) -> None:
        self._servers.tell_trainer(
            index=self._index, event=event, detail=detail, num_restarts=self._num_restarts, **more
        )
