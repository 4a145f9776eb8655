"""The processes that one machine has of a run: its servers, and its part of the trainer. Whoever leads a run (launcher.supervisor),
follows (launcher.follower) or only serves (launcher.serve) starts, watches and ends them here.

    start       the servers, then the trainer
    wait        for the first of: the end of the trainer, an event of the caller's, a signal
    end         SIGTERM and a grace, which a signal cuts short; what is left is killed when the context is left, with all that
                descends from it
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.launcher.children import KILL_TIMEOUT_S, Child, ending_children
from grpo_async.launcher.liveness import Liveness
from grpo_async.launcher.plan import ProcessPlan, first_server
from grpo_async.launcher.servers import SpawnedServers
from grpo_async.launcher.signals import Signals

if TYPE_CHECKING:
    from grpo_async.launcher.servers import TellTrainer

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
_RESTART_TIMEOUT_S = 25.0  # for a restart that is under way to come to a point where it can be left


class LocalProcesses:
    """An async context manager: left, nothing runs that was started in it.

    Args:
        total: servers of all machines; None: those here are all.

    Attributes:
        signals: that this process gets meanwhile.
        liveness: of the trainer's processes.
        servers: from the beginning of the context on.
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
        self._config = config
        self._plan = plan
        self._display = display
        self._tell_trainer = tell_trainer
        self._total = total
        self._trainer: Child | None = None
        self.signals = Signals()
        self.liveness = Liveness(plan.assignment, config.launch.heartbeat_timeout_s, display.warning)
        self.servers: SpawnedServers

    async def __aenter__(self) -> Self:
        assignment = self._plan.assignment
        async with AsyncExitStack() as stack:
            stack.enter_context(self.signals.installed())
            self._children = await stack.enter_async_context(
                ending_children(assignment.attempt_dir, self._display.warning)
            )
            await stack.enter_async_context(self.liveness)
            self.servers = SpawnedServers(
                self._plan.servers,
                self._config,
                self._display,
                tell_trainer=self._tell_trainer,
                children=self._children,
                first=first_server(self._config, assignment.node) if self._plan.servers else 0,
                total=self._total,
            )
            stack.push_async_callback(self.servers.abandon)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        """Start everything.

        Raises:
            RunError: a program cannot be started.
        """
        await self.servers.start()
        if self._plan.trainer is not None:
            self._trainer = await self._children.spawn(self._plan.trainer)

    @property
    def trainer(self) -> Child:
        """Only where the plan has one, and after `start`."""
        assert self._trainer is not None
        return self._trainer

    @property
    def is_training(self) -> bool:
        return self._trainer is not None and self._trainer.is_running

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

    async def keep_servers(self) -> None:
        """From now on the end of a server is not missed, because the run stops."""
        await self.servers.stop(_RESTART_TIMEOUT_S)

    async def end_servers(self) -> None:
        """No restart, then SIGTERM."""
        await self.keep_servers()
        await self._end(self.servers.running)

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
