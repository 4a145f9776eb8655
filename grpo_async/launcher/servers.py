"""The process of a server that a run starts: one that dies or hangs is killed with all its processes and started again.

inference.fleet draws the states of a server, and which of them this module receives or sends. The waits before a restart are
`inference.restart_delay_s`, doubled for each further one in a row, a minute at most. A row ends when a server has served for ten
minutes. A server keeps its URL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from grpo_async.config.sections import MAX_RESTART_DELAY_S, InferenceSection
from grpo_async.errors import RunError
from grpo_async.launcher.children import KILL_TIMEOUT_S, Child
from grpo_async.launcher.plan import ProcessSpec
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.text import count

if TYPE_CHECKING:
    from grpo_async.inference.fleet import ServerEvent
    from grpo_async.launcher.local import LocalProcesses

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


class _End(NamedTuple):
    """`how` completes "the server ..."; `asked` is True where the trainer wanted it to be restarted."""

    how: str
    asked: bool = False


class SpawnedServer:
    """One server over all its incarnations, which are counted from 0. Messages about an earlier incarnation are ignored. One that
    ends before it has ever served cannot start, and ends the run.

    Args:
        local: the processes that it is one of.
    """

    def __init__(self, index: int, spec: ProcessSpec, local: LocalProcesses, inference: InferenceSection) -> None:
        self.name = spec.name
        self.child: Child | None = None
        self._index = index
        self._spec = spec
        self._local = local
        self._restarts = RestartCount(inference.max_restarts, inference.restart_delay_s)
        self._incarnation = 0
        self._has_served = False
        self._asked = asyncio.Event()
        self._asked_reason = ""
        self._down_since: float | None = None

    async def start(self) -> None:
        self.child = await self._local.children.spawn(self._spec, incarnation=self._incarnation)

    def serves(self, incarnation: int | None = None) -> None:
        """The trainer has brought its weights to this server. `incarnation`: the one that the trainer means, if it says."""
        if incarnation not in (None, self._incarnation):
            return
        self._has_served = True
        self._restarts.serves()
        if self._down_since is not None:
            took_s = time.monotonic() - self._down_since
            self._local.display.note(f"the {self.name} serves again, {took_s:.1f} s after it was lost")
        self._down_since = None

    def ask_restart(self, reason: str, incarnation: int | None = None) -> None:
        """The trainer wants a restart. Ignored while one is under way: the trainer may have asked before it heard of that. When the
        run stops, the server is only killed: the trainer may be waiting for it, and has a checkpoint to write."""
        if self.child is None or incarnation not in (None, self._incarnation):
            return
        if self._local.stopping.is_set():
            self.child.kill()
            return
        self._asked_reason = reason
        self._asked.set()

    async def watch(self) -> None:
        """Watch and restart until the run stops or the server is lost for good.

        consumes: the end of the process, and requests to restart it; waits for: either, or `stopping`.
        """
        local, restarts = self._local, self._restarts
        end = await self._wait_for_end()
        while end is not None:
            last_words = await self._kill_the_rest(end)
            if not self._has_served and not end.asked:
                local.lose_servers(f"the {last_words}")
                return
            delay_s = restarts.next_delay_s()
            if delay_s is None:
                after = f"after {count(restarts.in_a_row, 'consecutive restart')} (inference.max_restarts)"
                self._tell("given_up", f"{end.how}, {after}")
                local.give_up(self._index, f"the {self.name} was given up {after}: it {end.how}", f"the {last_words}")
                return
            restart = f"restart {restarts.in_a_row} of {restarts.max_restarts}"
            local.display.warning(f"the {self.name} {end.how}; {restart} in {delay_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(local.stopping.wait(), delay_s)
            if local.stopping.is_set():
                return
            end = await self._restart() or await self._wait_for_end()

    def _tell(self, event: ServerEvent, detail: str) -> None:
        self._local.tell_trainer(self._index, event, detail, self._incarnation)

    async def _wait_for_end(self) -> _End | None:
        """None: the run stops."""
        assert self.child is not None
        events = [asyncio.ensure_future(event.wait()) for event in (self._asked, self._local.stopping)]
        try:
            await asyncio.wait([self.child.exited, *events], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        if self._local.stopping.is_set():
            return None
        if self.child.has_ended:  # the trainer may have noticed before this process did
            await asyncio.wait([self.child.exited], timeout=KILL_TIMEOUT_S)
        if not self.child.is_running:
            return _End(describe_exit(self.child.exited.result()))
        return _End(f"was killed: {self._asked_reason}", asked=True)

    async def _kill_the_rest(self, end: _End) -> str:
        """Kill what is left of it; returns how it ended, with the last lines of its log."""
        self._down_since = self._down_since or time.monotonic()
        if self._has_served or end.asked:
            self._tell("exited", end.how)
        self._asked.clear()
        child, self.child = self.child, None
        if child is None:  # it could not be started at all
            return f"{self.name} {end.how}"
        for process in await self._local.children.kill(child):
            self._local.display.warning(f"process {process.pid} of the {self.name} does not end even by SIGKILL")
        return child.describe_end(how=end.how)

    async def _restart(self) -> _End | None:
        """None: it runs."""
        self._incarnation += 1
        try:
            await self.start()
        except RunError as error:
            return _End(f"could not be started: {error}")
        assert self.child is not None
        self._tell("starting", f"restart {self._restarts.in_a_row}")
        self._local.display.note(f"the {self.name} starts again (log: {self.child.log.name})")
        return None
