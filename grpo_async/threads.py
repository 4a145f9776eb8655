"""Runs the user's blocking functions (rewards, tools, environments) in daemon threads, off the event loop.

A thread cannot be killed. One that outlives its deadline is abandoned and counted until it ends; with too many of them
running, further calls are refused. Threads are daemons, so an abandoned one does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar
from weakref import WeakKeyDictionary

from grpo_async.errors import GrpoAsyncError

Result = TypeVar("Result")


class ThreadsExhaustedError(GrpoAsyncError):
    """Too many threads outlived their deadlines: the function hangs, and threads cannot be killed."""


class ThreadRunner:
    """Threads of one function.

    Args:
        name: what runs in them, for threads and errors ("reward length").
        max_threads: calls that run at once; more wait.
        max_abandoned: with this many abandoned threads still running, calls are refused.
    """

    def __init__(self, name: str, *, max_threads: int = 8, max_abandoned: int = 4) -> None:
        self._name = name
        self._max_threads = max_threads
        # An asyncio semaphore belongs to one event loop, a function may serve several in turn.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._max_abandoned = max_abandoned
        self._num_abandoned = 0
        self._lock = threading.Lock()

    @property
    def num_abandoned(self) -> int:
        """Threads that outlived their call's deadline and still run."""
        return self._num_abandoned

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`, which must not raise, in a thread.

        Raises:
            TimeoutError: it took longer than `timeout_s` seconds; its thread is abandoned.
            ThreadsExhaustedError: too many abandoned threads are still running.
        """
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_threads)):
            if self._num_abandoned >= self._max_abandoned:
                raise ThreadsExhaustedError(
                    f"{self._name}: {self._num_abandoned} of its threads still run past their time limit, and threads "
                    "cannot be killed"
                )
            future: Future[Result] = Future()
            future.set_running_or_notify_cancel()
            context = contextvars.copy_context()
            thread = threading.Thread(target=lambda: future.set_result(context.run(work)), name=self._name, daemon=True)
            thread.start()
            waiter = asyncio.wrap_future(future)
            try:
                done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
                if not done:
                    raise TimeoutError
                return waiter.result()
            finally:
                if not waiter.done():  # time-out, or the caller was cancelled
                    waiter.cancel()
                    self._abandon(future)

    def _abandon(self, future: Future[Result]) -> None:
        self._add_abandoned(1)
        future.add_done_callback(lambda _: self._add_abandoned(-1))

    def _add_abandoned(self, change: int) -> None:
        with self._lock:
            self._num_abandoned += change
