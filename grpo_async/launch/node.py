"""The processes of one machine: its servers, and its part of the trainer. The launcher of a run (launch.supervise), a node of a Ray
cluster (launch.ray) and a command that only serves (launch.serve) start and end them here.

A server that dies or hangs is killed with all its processes and started again; it keeps its URL. inference.fleet has a diagram of
its states, which says what this module sends and receives. The wait before a restart is `inference.restart_delay_s`, doubled
with each further consecutive restart, a minute at most. The count is reset when a server has served for ten minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, Self, TypeAlias

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import MAX_RESTART_DELAY_S, InferenceSection
from grpo_async.display.display import Display
from grpo_async.errors import RunError
from grpo_async.launch.children import Child, Children
from grpo_async.launch.plan import ProcessPlan, ProcessSpec
from grpo_async.launch.signals import Signals
from grpo_async.launch.watcher import Watcher
from grpo_async.utils.concurrency import in_background
from grpo_async.utils.processes import KILL_TIMEOUT_S, describe_exit, is_running, raise_open_files_limit
from grpo_async.utils.retry import backoff_s
from grpo_async.utils.text import count

TellTrainer: TypeAlias = Callable[..., None]
"""Gets index, event (an inference.fleet.ServerEvent), detail, and the server's num_restarts, each by its name."""

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
_RESTART_TIMEOUT_S = 25.0  # for a restart in progress to reach a point where it can be abandoned
_RESTART_RESET_S = 600.0  # the count of a server that has served for so long is reset


class NodeProcesses:
    """An async context manager. When it is left, everything that was started in it is killed.

    Args:
        display: shows the user what happens to the servers.
        tell_trainer: None: there is no trainer that says when a server serves, so one that was started counts as serving.
        first_server: index of the first server of the plan.
        leads: false on a node that another one leads, which alone knows whether a server is left.

    Attributes:
        signals: those that this process receives.
        watcher: of the trainer's processes.
        stopping: set when the run stops; from then on a server may end, and is not started again.
        lost_servers: set when the run cannot continue without its servers; `server_failure` says why.
        has_trainer: whether a trainer, on any machine, says when a server serves.
        have_served: whether some server, of any machine, has ever served: then there may be steps to save.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        plan: ProcessPlan,
        display: Display,
        *,
        tell_trainer: TellTrainer | None,
        first_server: int = 0,
        leads: bool = True,
    ) -> None:
        assignment = plan.assignment
        self.display = display
        self.has_trainer = tell_trainer is not None
        self.tell_trainer: TellTrainer = tell_trainer or (lambda **_: None)
        self.children = Children(assignment.attempt_dir, display.warning)
        self.signals = Signals()
        self.watcher = Watcher(assignment, config, display.warning)
        self.stopping = asyncio.Event()
        self.lost_servers = asyncio.Event()
        self.server_failure: str | None = None
        self.have_served = False
        self._plan = plan
        self._trainer: Child | None = None
        self._total = config.num_servers  # of all machines
        self._lost: dict[int, str] = {}  # servers of all machines, and why
        self._leads = leads
        self._servers = {
            index: _Server(index, spec, self, config.inference)
            for index, spec in enumerate(plan.servers, start=first_server)
        }
        self._stack = AsyncExitStack()
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        raise_open_files_limit()
        async with self._stack as stack:
            stack.enter_context(self.signals.installed())
            await stack.enter_async_context(self.children)
            await stack.enter_async_context(self.watcher)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def start(self) -> None:
        """Start the servers, then the trainer, and watch the servers. Raises RunError: a program cannot be started."""
        for server in self._servers.values():
            await server.start()
        for server in self._servers.values():
            watch = in_background(server.watch(), name=f"watch the {server.name}")
            self._watches.append(await self._stack.enter_async_context(watch))
        if self._plan.trainer is not None:
            self._trainer = await self.children.spawn(self._plan.trainer)

    @property
    def trainer(self) -> Child:
        """The process of the trainer: only where the plan has one, and after `start`."""
        assert self._trainer is not None
        return self._trainer

    @property
    def is_training(self) -> bool:
        return self._trainer is not None and self._trainer.is_running

    @property
    def running_servers(self) -> list[Child]:
        children = [server.child for server in self._servers.values()]
        return [child for child in children if child is not None and child.is_running]

    async def wait(self, *events: asyncio.Event, timeout_s: float | None = None) -> None:
        """Wait until the trainer ends, one of `events` is set or a signal arrives. Without `timeout_s` as long as the run takes:
        the trainer has deadlines for everything that it waits for."""
        children = [] if self._trainer is None else [self._trainer]
        await _first_of(children, [self.signals.arrived, *events], timeout_s)

    async def end_trainer(self) -> None:
        """Send SIGTERM to the trainer and wait for its end; a signal to the launcher cuts the grace period short."""
        if self._trainer is not None:
            await self._end([self._trainer])

    async def end_servers(self) -> None:
        """Restart no server from now on, and send SIGTERM to each."""
        self.stopping.set()
        if self._watches:
            await asyncio.wait(self._watches, timeout=_RESTART_TIMEOUT_S)
        await self._end(self.running_servers)

    def receive(self, message: Mapping[str, Any]) -> bool:
        """Handle server_serving or restart_server of the trainer. False: the server is not started here."""
        server, is_serving = self._servers.get(message["index"]), message["kind"] == "server_serving"
        self.have_served = self.have_served or is_serving
        if server is None:
            return False
        if is_serving:
            server.mark_serving(message["num_restarts"])
        else:
            server.ask_restart(str(message["reason"]), message["num_restarts"])
        return True

    def fail(self, failure: str) -> None:
        """The run cannot continue; the first reason counts."""
        self.server_failure = self.server_failure or failure
        self.lost_servers.set()

    def mark_lost(self, index: int, why: str, *log_tail: str) -> None:
        """A server, of any machine, does not come back. The run continues as long as there is another; only the launcher that
        leads knows whether there is."""
        if not self._leads:
            self.display.warning(why)
            return
        self._lost.setdefault(index, why)
        if left := self._total - len(self._lost):
            self.display.warning(f"{why}; the run continues with {left} of {self._total}")
        else:
            self.fail("\n".join([*self._lost.values(), *log_tail]))

    async def _end(self, children: Sequence[Child]) -> None:
        self.signals.arrived.clear()
        for child in children:
            child.terminate()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + GRACE_S
        while (left := [child for child in children if child.is_running]) and not self.signals.arrived.is_set():
            if (left_s := ends_at - loop.time()) <= 0:
                return
            await _first_of(left, [self.signals.arrived], left_s)


async def _first_of(children: Sequence[Child], events: Sequence[asyncio.Event], timeout_s: float | None = None) -> None:
    """Wait for the end of a child or for an event."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        tasks = [*waits, *(child.exited for child in children)]
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class RestartCount:
    """Consecutive restarts of one server, see `inference.max_restarts` and `inference.restart_delay_s`. `clock` gives seconds."""

    def __init__(self, max_restarts: int, delay_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts = max_restarts
        self.in_a_row = 0
        self._delay_s = delay_s
        self._clock = clock
        self._serving_since: float | None = None

    def mark_serving(self) -> None:
        """The server serves from now on."""
        self._serving_since = self._clock()

    def next_delay_s(self) -> float | None:
        """The server has ended: seconds to wait before it is started again; None: it is lost.

        Worked example: delay_s 1, max_restarts 3, ends in a row -> 1, 2, 4, None.
        """
        if self._serving_since is not None and self._clock() - self._serving_since >= _RESTART_RESET_S:
            self.in_a_row = 0
        self._serving_since = None
        if self.in_a_row >= self.max_restarts:
            return None
        self.in_a_row += 1
        return backoff_s(self.in_a_row - 1, self._delay_s, MAX_RESTART_DELAY_S)


class _End(NamedTuple):
    """`how` completes "the server ..."; `asked` is True where the trainer wanted it to be restarted."""

    how: str
    asked: bool = False


class _Server:
    """One server over all its restarts. Messages from before the last restart are ignored. A server that ends before it has ever
    served cannot start, and ends the run."""

    def __init__(self, index: int, spec: ProcessSpec, node: NodeProcesses, inference: InferenceSection) -> None:
        self.name = spec.name
        self.child: Child | None = None
        self._index = index
        self._spec = spec
        self._node = node
        self._restarts = RestartCount(inference.max_restarts, inference.restart_delay_s)
        self._num_restarts = 0
        self._has_served = False
        self._asked = asyncio.Event()
        self._asked_reason = ""
        self._down_since: float | None = None

    async def start(self) -> None:
        self.child = await self._node.children.spawn(self._spec, num_restarts=self._num_restarts)
        if not self._node.has_trainer:
            self._count_as_serving()

    def mark_serving(self, num_restarts: int) -> None:
        """The trainer has brought its weights to this server. `num_restarts`: those that the trainer knew of."""
        if num_restarts != self._num_restarts:
            return
        if self._down_since is not None:
            took_s = time.monotonic() - self._down_since
            self._node.display.note(f"the {self.name} serves again, {took_s:.1f} s after it was lost")
        self._count_as_serving()

    def _count_as_serving(self) -> None:
        self._has_served = True
        self._restarts.mark_serving()
        self._down_since = None

    def ask_restart(self, reason: str, num_restarts: int) -> None:
        """The trainer wants a restart. Ignored while one is under way: the trainer may have asked before it heard of that. When the
        run stops, the server is only killed: the trainer may be waiting for it, and has a checkpoint to write."""
        if self.child is None or num_restarts != self._num_restarts:
            return
        if self._node.stopping.is_set():
            self.child.kill()
            return
        self._asked_reason = reason
        self._asked.set()

    async def watch(self) -> None:
        """Restart the server whenever its process ends or the trainer asks for it, until the run stops or the server is lost."""
        node, restarts = self._node, self._restarts
        end = await self._wait_for_end()
        while end is not None:
            log_tail = await self._kill_the_rest(end)
            if not self._has_served and not end.asked:
                node.fail(f"the {log_tail}")
                return
            delay_s = restarts.next_delay_s()
            if delay_s is None:
                after = f"after {count(restarts.in_a_row, 'consecutive restart')} (inference.max_restarts)"
                self._tell("given_up", f"{end.how}, {after}")
                node.mark_lost(self._index, f"the {self.name} was given up {after}: it {end.how}", f"the {log_tail}")
                return
            restart = f"restart {restarts.in_a_row} of {restarts.max_restarts}"
            node.display.warning(f"the {self.name} {end.how}; {restart} in {delay_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(node.stopping.wait(), delay_s)
            if node.stopping.is_set():
                return
            end = await self._restart() or await self._wait_for_end()

    def _tell(self, event: str, detail: str) -> None:
        self._node.tell_trainer(index=self._index, event=event, detail=detail, num_restarts=self._num_restarts)

    async def _wait_for_end(self) -> _End | None:
        """Wait until the process ends or the trainer asks for a restart; None: the run stops."""
        assert self.child is not None
        await _first_of([self.child], [self._asked, self._node.stopping])
        if self._node.stopping.is_set():
            return None
        if not is_running(self.child.pid):  # the trainer may have noticed before this process did
            await asyncio.wait([self.child.exited], timeout=KILL_TIMEOUT_S)
        if not self.child.is_running:
            return _End(describe_exit(self.child.exited.result()))
        return _End(f"was killed: {self._asked_reason}", asked=True)

    async def _kill_the_rest(self, end: _End) -> str:
        """Kill what is left of the server; returns how it ended, with the last lines of its log."""
        self._down_since = self._down_since or time.monotonic()
        if self._has_served or end.asked:
            self._tell("exited", end.how)
        self._asked.clear()
        child, self.child = self.child, None
        if child is None:  # it could not be started at all
            return f"{self.name} {end.how}"
        await self._node.children.kill(child)
        return child.describe_end(how=end.how)

    async def _restart(self) -> _End | None:
        """Start the process again; None: it was started."""
        self._num_restarts += 1
        try:
            await self.start()
        except RunError as error:
            return _End(f"could not be started: {error}")
        assert self.child is not None
        self._tell("starting", f"restart {self._restarts.in_a_row}")
        self._node.display.note(f"the {self.name} starts again (log: {self.child.log.name})")
        return None
