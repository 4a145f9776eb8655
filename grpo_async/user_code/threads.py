"""Runs users' blocking functions in daemon threads, off the event loop.

A thread cannot be killed. One that outlives its call's time limit is abandoned and counted until it ends; once as
many are stuck as calls may run, further calls are refused. A thread whose caller was cancelled keeps its slot until
it ends or its limit has passed.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from grpo_async.errors import GrpoAsyncError

Result = TypeVar("Result")

_MIN_ABANDONED = 4
"""The number of threads that may be stuck if fewer calls may run."""


class ThreadsExhaustedError(GrpoAsyncError):
    """Too many threads outlived their deadlines: the function hangs, and threads cannot be killed."""


class ThreadRunner:
    """Threads for one function."""

    def __init__(self, name: str, *, max_threads: int = 8) -> None:
        self._name = name
        self._max_threads = max_threads
        # An asyncio semaphore belongs to one event loop, but a function may serve several in turn.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._max_abandoned = max(max_threads, _MIN_ABANDONED)
        self._abandoned: set[Future[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()  # event loops hold only weak references to tasks

    @property
    def num_abandoned(self) -> int:
        """Threads that outlived their call's time limit and still run."""
        return len(self._abandoned)

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`, which must not raise, in a thread.

        Raises:
            TimeoutError: it took longer than `timeout_s` seconds; its thread is abandoned.
            ThreadsExhaustedError: too many abandoned threads are still running.
        """
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_threads))
        await slots.acquire()  # the calls that hold slots have time limits
        # A separate task keeps the slot if the caller is cancelled.
        task = asyncio.create_task(self._run(work, timeout_s, slots))
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # if the caller was cancelled, nobody else reads it, and asyncio would log an error

    async def _run(self, work: Callable[[], Result], timeout_s: float, slots: asyncio.Semaphore) -> Result:
        try:
            if self.num_abandoned >= self._max_abandoned:
                raise ThreadsExhaustedError(
                    f"{self._name}: {self.num_abandoned} of its threads still run past their time limit, and threads "
                    "cannot be killed"
                )
            future, make = _job(work)
            threading.Thread(target=make, name=self._name, daemon=True).start()
            try:
                return await _await_within(future, timeout_s)
            except (TimeoutError, asyncio.CancelledError):  # the latter: the event loop ends
                self._abandoned.add(future)
                future.add_done_callback(self._abandoned.discard)
                raise
        finally:
            slots.release()


class InstanceThread:
    """The only thread of an environment's instance: the instance is constructed there, and all its plain methods run there.

    Environments may hold objects that belong to a thread (an sqlite connection, a browser, an event loop of a client library), and
    one thread also makes sure that no two calls overlap.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()

    def post(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work`, which must not raise."""
        future, make = _job(work)
        self._queue.put(make)
        return future

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`; it continues in the thread if this is cancelled or too slow (TimeoutError)."""
        return await _await_within(self.post(work), timeout_s)

    def stop(self) -> None:
        """End the thread after the queued work."""
        self._queue.put(None)


async def _await_within(future: Future[Result], timeout_s: float) -> Result:
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(future)


def _job(work: Callable[[], Result]) -> tuple[Future[Result], Callable[[], None]]:
    """The future of the result, and a function that computes it with the caller's context variables."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # so that set_result cannot raise after a cancellation
    context = contextvars.copy_context()
    return future, lambda: future.set_result(context.run(work))


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    # A function without `self`: the thread must not keep its owner alive.
    while (make := queue.get()) is not None:  # stop() posts the None
        make()
        del make  # it holds the call's arguments, and the next call may come much later
