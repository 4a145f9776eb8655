"""How many rollouts are in flight with `rollout.max_in_flight: auto`: as many as the servers run without making requests wait.
The limit is doubled until servers are crowded, then raised by an eighth, and lowered to what they run, as TCP's window is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal

from grpo_async.inference.api import ServerInfo

_FULL = 0.95  # of the KV cache: vLLM preempts requests when there is no more room
_WAITING = 8  # crowded: more than one request waits for this many that run


class AdaptiveSlots(asyncio.Semaphore):
    """A semaphore whose `limit` follows the reports of the servers, from `first` to `most`; `every_s`: between two of them."""

    def __init__(self, *, first: int, most: int, every_s: float) -> None:
        super().__init__(min(first, most))
        self._every_s, self._reported_at = every_s, 0.0
        self._used_on: asyncio.AbstractEventLoop | None = None
        self.limit, self.in_flight = min(first, most), 0
        self._most = most
        self._too_many = 0  # slots that a lower limit takes back when they are released
        self._starts = True
        self._was_crowded = False

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        self._used_on = asyncio.get_running_loop()
        self.in_flight += 1
        return True

    def release(self) -> None:
        self.in_flight -= 1
        self._give_back()

    def report_soon(self, servers: Sequence[ServerInfo]) -> None:
        """`report` on the loop of the rollouts, from any thread, unless it was a moment ago: each server has heartbeats."""
        now = time.monotonic()
        if self._used_on is not None and not self._used_on.is_closed() and now - self._reported_at >= self._every_s:
            self._reported_at = now
            self._used_on.call_soon_threadsafe(self.report, servers)

    def report(self, servers: Sequence[ServerInfo]) -> None:
        """Adapt the limit. Servers are crowded if two reports in a row say so: requests that have just arrived wait, too."""
        running = sum(each.running_requests for each in servers)
        if not running:  # none, or all are frozen by a push
            return
        is_crowded = any(
            each.waiting_requests * _WAITING > each.running_requests or (each.kv_usage or 0.0) > _FULL
            for each in servers
        )
        if is_crowded and self._was_crowded:
            self._starts = False
            self._resize(min(self.limit, running))
        elif not is_crowded and self.in_flight >= self.limit:
            self._resize(min(self._most, 2 * self.limit if self._starts else self.limit + max(1, self.limit // 8)))
        self._was_crowded = is_crowded

    def _resize(self, limit: int) -> None:
        change, self.limit = limit - self.limit, limit
        self._too_many += max(0, -change)
        for _ in range(change):
            self._give_back()

    def _give_back(self) -> None:
        if self._too_many:
            self._too_many -= 1
        else:
            super().release()
