"""Admission: how far generation may run ahead of training, so that little is thrown away as stale.

    groups admitted and not released <= (server_version + max_staleness + 1) x groups_per_step

counted from the start of the run. Groups that a step takes, to train them or to filter them, stay counted: the version that the
step makes admits the next ones. Groups that no step takes (failed, stale, cancelled, filtered before) are released at once, else
admission would deadlock. With max_staleness 0 this is synchronous GRPO.
Worked example: 4 groups per step, max_staleness 1: 8 groups start at version 0; one fails -> 1 more; version 1 -> 4 more.
"""

from __future__ import annotations

import asyncio
import threading


class Admission:
    """`admit` is awaited by the rollout thread; `release` and `advance` may be called from any thread.

    Args:
        groups_per_step: groups that one optimizer step consumes.
        max_staleness: in optimizer steps.
        version: policy version at the start (after a resume: the step of the checkpoint).
        last_version: version after the last optimizer step; nothing is admitted that no step could consume.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int, version: int, last_version: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._first_version = version
        self._last_version = last_version
        self._version = version
        self._admitted = 0
        self._released = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None

    @property
    def capacity(self) -> int:
        """Groups that may be admitted right now."""
        steps = min(self._version + self._max_staleness + 1, self._last_version) - self._first_version
        return steps * self._groups_per_step - (self._admitted - self._released)

    async def admit(self) -> None:
        """Consumes one place. Waits for: a free place. Unblocked by: `release`, `advance`."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._changed = asyncio.Event()
            with self._lock:
                if self.capacity > 0:
                    self._admitted += 1
                    return
            await self._changed.wait()  # cancelled with the run

    def occupy(self, num_groups: int) -> None:
        """Take places without waiting, for groups that a resume puts back into the queue: they had them before."""
        with self._lock:
            self._admitted += num_groups

    def release(self, num_groups: int = 1) -> None:
        """Give back the places of groups that will not be trained."""
        with self._lock:
            self._released += num_groups
        self._wake()

    def advance(self, version: int) -> None:
        """The server serves `version` from now on."""
        with self._lock:
            self._version = max(self._version, version)
        self._wake()

    def _wake(self) -> None:
        loop, changed = self._loop, self._changed
        if loop is not None and changed is not None and not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)
