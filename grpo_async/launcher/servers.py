"""The processes of the servers that a run starts: what dies or hangs is killed with all its processes and started again.

inference.fleet draws the states of a server, and which of them this module receives or sends. The waits before a restart are
`inference.restart_delay_s`, doubled for each further one in a row, a minute at most. A row ends when a server has served for ten
minutes. A server keeps its URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import MAX_RESTART_DELAY_S
from grpo_async.display.display import Display
from grpo_async.errors import RunError
from grpo_async.launcher.children import KILL_TIMEOUT_S, Child, Children
from grpo_async.launcher.plan import ProcessSpec
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.text import count

if TYPE_CHECKING:
    from grpo_async.inference.fleet import ServerEvent

    TellTrainer = Callable[[int, ServerEvent, str, int], None]
    """Gets index, event, detail, and the server's incarnation."""

_SERVED_WELL_S = 600.0  # after so long, an end is no longer one of a row


class RestartCount:
    """Restarts in a row of one server, see `inference.max_restarts` and `inference.restart_delay_s`. `clock` gives seconds."""

    def __init__(self, max_restarts: int, delay_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts = max_restarts
        self.in_a_row = 0
        self._delay_s = delay_s
        self._clock = clock
        self._serving_since: float | None = None

    def serves(self) -> None:
        """The server serves from now on."""
        self._serving_since = self._clock()

    def next_delay_s(self) -> float | None:
        """The server has ended: seconds to wait before it is started again; None: give it up.

        Worked example: delay_s 1, max_restarts 3, ends in a row -> 1, 2, 4, None.
        """
        if self._serving_since is not None and self._clock() - self._serving_since >= _SERVED_WELL_S:
            self.in_a_row = 0
        self._serving_since = None
        if self.in_a_row >= self.max_restarts:
            return None
        self.in_a_row += 1
        return min(MAX_RESTART_DELAY_S, self._delay_s * 2.0 ** (self.in_a_row - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """`how` completes "the server ..."; `asked` is True where the trainer wanted it to be restarted."""

    how: str
    asked: bool = False


class SpawnedServer:
    """One server over all its incarnations, which are counted from 0. Messages about an earlier incarnation are ignored."""

    def __init__(self, index: int, spec: ProcessSpec, servers: SpawnedServers, restarts: RestartCount) -> None:
        self.name = spec.name
        self.child: Child | None = None
        self.has_served = False
        """In any incarnation. One that ends before that cannot start, and ends the run."""
        self._index = index
        self._spec = spec
        self._servers = servers
        self._display = servers.display
        self._restarts = restarts
        self._incarnation = 0
        self._asked = asyncio.Event()
        self._asked_reason = ""
        self._down_since: float | None = None

    async def start(self) -> None:
        self.child = await self._servers.children.spawn(self._spec, incarnation=self._incarnation)

    def serves(self, incarnation: int | None = None) -> None:
        """The trainer has brought its weights to this server. `incarnation`: the one that the trainer means, if it says."""
        if incarnation not in (None, self._incarnation):
            return
        self.has_served = True
        self._restarts.serves()
        if self._down_since is not None:
            took_s = time.monotonic() - self._down_since
            self._display.note(f"the {self.name} serves again, {took_s:.1f} s after it was lost")
        self._down_since = None

    def ask_restart(self, reason: str, incarnation: int | None = None) -> None:
        """The trainer wants a restart. Ignored while one is under way: the trainer may have asked before it heard of that. When the
        run stops, the server is only killed: the trainer may be waiting for it, and has a checkpoint to write."""
        if self.child is None or incarnation not in (None, self._incarnation):
            return
        if self._servers.stopping.is_set():
            self.child.kill()
            return
        self._asked_reason = reason
        self._asked.set()

    async def watch(self) -> None:
        """Watch and restart until the run stops or the server is lost for good.

        consumes: the end of the process, and requests to restart it; waits for: either, or `stopping`.
        """
        while (end := await self._wait_for_end()) is not None:
            while end is not None:  # until it could be started again
                last_words = await self._kill_the_rest(end)
                if not self.has_served and not end.asked:
                    self._servers.lost(f"the {last_words}")
                    return
                delay_s = self._restarts.next_delay_s()
                if delay_s is None:
                    after = f"after {count(self._restarts.in_a_row, 'consecutive restart')} (inference.max_restarts)"
                    self._tell("given_up", f"{end.how}, {after}")
                    why = f"the {self.name} was given up {after}: it {end.how}"
                    self._servers.give_up(self._index, why, f"the {last_words}")
                    return
                restart = f"restart {self._restarts.in_a_row} of {self._restarts.max_restarts}"
                self._display.warning(f"the {self.name} {end.how}; {restart} in {delay_s:g} s")
                if await self._servers.stops_within(delay_s):
                    return
                end = await self._restart()

    def _tell(self, event: ServerEvent, detail: str) -> None:
        self._servers.tell_trainer(self._index, event, detail, self._incarnation)

    async def _wait_for_end(self) -> _End | None:
        """None: the run stops."""
        assert self.child is not None
        events = [asyncio.ensure_future(event.wait()) for event in (self._asked, self._servers.stopping)]
        try:
            await asyncio.wait([self.child.exited, *events], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        if self._servers.stopping.is_set():
            return None
        if self.child.has_ended:  # the trainer may have noticed before this process did
            await asyncio.wait([self.child.exited], timeout=KILL_TIMEOUT_S)
        if not self.child.is_running:
            return _End(how=describe_exit(self.child.exited.result()))
        return _End(how=f"was killed: {self._asked_reason}", asked=True)

    async def _kill_the_rest(self, end: _End) -> str:
        """Kill what is left of it; returns how it ended, with the last lines of its log."""
        self._down_since = self._down_since or time.monotonic()
        if self.has_served or end.asked:
            self._tell("exited", end.how)
        self._asked.clear()
        child, self.child = self.child, None
        if child is None:  # it could not be started at all
            return f"{self.name} {end.how}"
        for process in await self._servers.children.kill(child):
            self._display.warning(f"process {process.pid} of the {self.name} does not end even by SIGKILL")
        return child.describe_end(how=end.how)

    async def _restart(self) -> _End | None:
        """None: it runs."""
        self._incarnation += 1
        try:
            await self.start()
        except RunError as error:
            return _End(how=f"could not be started: {error}")
        assert self.child is not None
        self._tell("starting", f"restart {self._restarts.in_a_row}")
        self._display.note(f"the {self.name} starts again (log: {self.child.log.name})")
        return None


class SpawnedServers:
    """All servers that a run has started on this machine, in the order of their index; there may be none.

    Args:
        display: shows the user what becomes of the servers.
        tell_trainer: see TellTrainer.
        children: of the launcher; the servers are among them.
        first: index of the first of them among those of all machines, which are `total`; None: there are no others.

    Attributes:
        lost_all: set when the run cannot continue without its servers; `failure` says why.
        have_served: whether some server, of any machine, has ever served: then there may be steps to save.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        config: ExperimentConfig,
        display: Display,
        *,
        tell_trainer: TellTrainer,
        children: Children,
        first: int = 0,
        total: int | None = None,
    ) -> None:
        self.display = display
        self.tell_trainer = tell_trainer
        self.children = children
        self.stopping = asyncio.Event()
        self.lost_all = asyncio.Event()
        self.failure: str | None = None
        self.have_served = False
        self._tasks: list[asyncio.Task[None]] = []
        self._total = len(specs) if total is None else total
        self._reasons: dict[int, str] = {}  # of those that are given up, on all machines
        limit, delay_s = config.inference.max_restarts, config.inference.restart_delay_s
        self._servers = {
            index: SpawnedServer(index, spec, self, RestartCount(limit, delay_s))
            for index, spec in enumerate(specs, start=first)
        }

    async def start(self) -> None:
        """Start every server, and watch them.

        Raises:
            RunError: a program cannot be started.
        """
        for server in self._servers.values():
            await server.start()
        for server in self._servers.values():
            task = asyncio.create_task(server.watch(), name=f"watch the {server.name}")
            task.add_done_callback(self._end_with_error)
            self._tasks.append(task)

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

    async def stop(self, timeout_s: float) -> None:
        """Watch and restart no more; the servers run on. Returns when no restart is under way, or after `timeout_s`."""
        self.stopping.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        self.raise_errors()

    async def abandon(self) -> None:
        """Leave everything as it is, at once: from then on no server is started."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=KILL_TIMEOUT_S)

    @property
    def running(self) -> list[Child]:
        """Servers whose process lives."""
        children = [server.child for server in self._servers.values()]
        return [child for child in children if child is not None and child.is_running]

    def raise_errors(self) -> None:
        """An error of our own in a watch, which ended it."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def stops_within(self, timeout_s: float) -> bool:
        """Whether the run stops within `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), timeout_s)
        return self.stopping.is_set()

    def lost(self, failure: str) -> None:
        """The run cannot continue; the first reason counts."""
        self.failure = self.failure or failure
        self.lost_all.set()

    def give_up(self, index: int, why: str, *last_words: str) -> None:
        """A server, of any machine, is given up or gone; the run continues as long as there is another."""
        if index in self._reasons:
            return
        self._reasons[index] = why
        left = self._total - len(self._reasons)
        if left:
            self.display.warning(f"{why}; the run continues with {left} of {self._total}")
        else:
            self.lost("\n".join([*self._reasons.values(), *last_words]))

    def _end_with_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.lost_all.set()
