"""The processes that one machine has of a run: its servers, and its part of the trainer. Whoever leads a run (launcher.supervisor),
follows (launcher.follower) or only serves (launcher.serve) starts, watches and ends them here.

    start       the servers, then the trainer
    wait        for the first of: the end of the trainer, an event of the caller's, a signal
    end         SIGTERM and a grace, which a signal cuts short; what is left is killed when the context is left, with all that
                descends from it
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.launcher.children import KILL_TIMEOUT_S, Child, Children
from grpo_async.launcher.liveness import Liveness
from grpo_async.launcher.plan import ProcessPlan, first_server
from grpo_async.launcher.servers import SpawnedServer
from grpo_async.launcher.signals import Signals
from grpo_async.utils.concurrency import in_background

if TYPE_CHECKING:
    from grpo_async.launcher.servers import TellTrainer

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
_RESTART_TIMEOUT_S = 25.0  # for a restart that is under way to come to a point where it can be left


class LocalProcesses:
    """An async context manager: left, nothing runs that was started in it.

    Args:
        display: shows the user what becomes of the servers.
        tell_trainer: see TellTrainer.
        total: servers of all machines; None: those here are all.

    Attributes:
        signals: that this process gets meanwhile.
        liveness: of the trainer's processes.
        stopping: set when the run stops: from then on the end of a server is not missed.
        lost_servers: set when the run cannot continue without its servers; `server_failure` says why.
        have_served: whether some server, of any machine, has ever served: then there may be steps to save.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        plan: ProcessPlan,
        display: Display,
        *,
        tell_trainer: TellTrainer,
        total: int | None = None,
    ) -> None:
        assignment = plan.assignment
        self.display = display
        self.tell_trainer = tell_trainer
        self.children = Children(assignment.attempt_dir, display.warning)
        self.signals = Signals()
        self.liveness = Liveness(assignment, config.launch.heartbeat_timeout_s, display.warning)
        self.stopping = asyncio.Event()
        self.lost_servers = asyncio.Event()
        self.server_failure: str | None = None
        self.have_served = False
        self._plan = plan
        self._trainer: Child | None = None
        self._total = len(plan.servers) if total is None else total
        self._given_up: dict[int, str] = {}  # servers of all machines, and why
        first = first_server(config, assignment.node) if plan.servers else 0
        self._servers = {
            index: SpawnedServer(index, spec, self, config.inference)
            for index, spec in enumerate(plan.servers, start=first)
        }
        self._stack = AsyncExitStack()
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        async with self._stack as stack:
            stack.enter_context(self.signals.installed())
            await stack.enter_async_context(self.children)
            await stack.enter_async_context(self.liveness)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def start(self) -> None:
        """Start everything, and watch the servers. An error of our own in a watch ends the caller's task with it.

        Raises:
            RunError: a program cannot be started.
        """
        for server in self._servers.values():
            await server.start()
        for server in self._servers.values():
            watch = in_background(server.watch(), name=f"watch the {server.name}")
            self._watches.append(await self._stack.enter_async_context(watch))
        if self._plan.trainer is not None:
            self._trainer = await self.children.spawn(self._plan.trainer)

    @property
    def trainer(self) -> Child:
        """Only where the plan has one, and after `start`."""
        assert self._trainer is not None
        return self._trainer

    @property
    def is_training(self) -> bool:
        return self._trainer is not None and self._trainer.is_running

    @property
    def running_servers(self) -> list[Child]:
        """Those whose process lives."""
        children = [server.child for server in self._servers.values()]
        return [child for child in children if child is not None and child.is_running]

    async def wait(self, *events: asyncio.Event, for_trainer: bool = True, timeout_s: float | None = None) -> None:
        """Until the trainer ends, one of `events` is set or a signal arrives. Without `timeout_s` as long as the run takes: the
        trainer has deadlines for everything that it waits for, and a run has no other natural bound."""
        children = [self._trainer] if for_trainer and self._trainer is not None else []
        await self._first_of(children, events, timeout_s)

    async def end_trainer(self) -> None:
        """SIGTERM; a signal to the launcher cuts the grace short."""
        if self._trainer is not None:
            await self._end([self._trainer])

    async def kill_trainer(self) -> None:
        """At once, as after a second signal, or of one that is frozen."""
        self.trainer.kill()
        await asyncio.wait([self.trainer.exited], timeout=KILL_TIMEOUT_S)

    async def end_servers(self) -> None:
        """No restart, then SIGTERM."""
        self.stopping.set()
        if self._watches:
            await asyncio.wait(self._watches, timeout=_RESTART_TIMEOUT_S)
        await self._end(self.running_servers)

    def receive(self, message: Mapping[str, Any]) -> bool:
        """Handle what the trainer says of a server: server_serving or restart_server (processes.control). False: the server is not
        started here."""
        server, serves = self._servers.get(message["index"]), message["kind"] == "server_serving"
        self.have_served |= serves
        if server is None:
            return False
        if serves:
            server.serves(message.get("incarnation"))
        else:
            server.ask_restart(str(message.get("reason")), message.get("incarnation"))
        return True

    def lose_servers(self, failure: str) -> None:
        """The run cannot continue; the first reason counts."""
        self.server_failure = self.server_failure or failure
        self.lost_servers.set()

    def give_up(self, index: int, why: str, *last_words: str) -> None:
        """A server, of any machine, is given up or gone; the run continues as long as there is another."""
        if index in self._given_up:
            return
        self._given_up[index] = why
        if left := self._total - len(self._given_up):
            self.display.warning(f"{why}; the run continues with {left} of {self._total}")
        else:
            self.lose_servers("\n".join([*self._given_up.values(), *last_words]))

    async def _end(self, children: Sequence[Child]) -> None:
        self.signals.arrived.clear()
        for child in children:
            child.terminate()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + GRACE_S
        while (left := [child for child in children if child.is_running]) and not self.signals.arrived.is_set():
            if (left_s := ends_at - loop.time()) <= 0:
                return
            await self._first_of(left, (), left_s)

    async def _first_of(
        self, children: Sequence[Child], events: Sequence[asyncio.Event], timeout_s: float | None
    ) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self.signals.arrived, *events)]
        try:
            await asyncio.wait(
                [*waits, *(child.exited for child in children)],
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()
