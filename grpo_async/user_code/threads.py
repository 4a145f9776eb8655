"""Runs the user's blocking functions in daemon threads, off the event loop: a ThreadRunner those that may run at the same time
(rewards, tools), an InstanceThread those of one environment.

A thread cannot be killed. One that outlives its call's time limit is abandoned and counted until it ends; once as many of them
are stuck as calls may run, further calls are refused. (Not before: when what they all wait for hangs, they pass their limits
together.) One whose caller was cancelled keeps its place among the calls that run at once until it ends or until the limit of its
call has passed, and only then counts as abandoned. So neither hanging nor cancelled calls pile up threads: there are never more
than twice `max_threads`, or `max_threads` + 4 where that is more. Threads are daemons, so one that is left does not keep the
process from ending.
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
from grpo_async.utils.concurrency import in_thread

Result = TypeVar("Result")

_MIN_ABANDONED = 4
"""So many may be stuck where fewer calls may run."""


class ThreadsExhaustedError(GrpoAsyncError):
    """Too many threads outlived their deadlines: the function hangs, and threads cannot be killed."""


class ThreadRunner:
    """Threads of one function.

    Args:
        name: what runs in them, for threads and errors ("reward length").
        max_threads: calls that run at once, those of cancelled callers among them; more wait.
    """

    def __init__(self, name: str, *, max_threads: int = 8) -> None:
        self._name = name
        self._max_threads = max_threads
        # An asyncio semaphore belongs to one event loop, a function may serve several in turn.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._max_abandoned = max(max_threads, _MIN_ABANDONED)
        self._abandoned: set[Future[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()  # event loops hold their tasks weakly

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
        await slots.acquire()  # the calls that hold them have limits
        # A task of its own: it keeps the slot where the caller is cancelled.
        task = asyncio.create_task(self._run(work, timeout_s, slots))
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # where the caller was cancelled, nobody else asks, and asyncio would log it as an error

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
                return await _result_within(future, timeout_s)
            except (TimeoutError, asyncio.CancelledError):  # the latter: the event loop ends
                self._abandoned.add(future)
                future.add_done_callback(self._abandoned.discard)
                raise
        finally:
            slots.release()


class InstanceThread:
    """The one thread of an environment's instance: it is constructed there, and all its plain methods run there.

    Environments may hold what belongs to a thread (an sqlite connection, a browser, an event loop of a client library), and one
    thread also makes sure that no two calls overlap.

    Args:
        name: for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()

    def post(self, work: Callable[[], Result]) -> Future[Result]:
        """Put `work`, which must not raise, behind what is already there."""
        future, make = _job(work)
        self._queue.put(make)
        return future

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`; it goes on in the thread where this is cancelled or too slow (TimeoutError)."""
        return await _result_within(self.post(work), timeout_s)

    def stop(self) -> None:
        """End the thread after what is already there."""
        self._queue.put(None)


async def _result_within(future: Future[Result], timeout_s: float) -> Result:
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(future)


def _job(work: Callable[[], Result]) -> tuple[Future[Result], Callable[[], None]]:
    """The future result, and what makes it, with the caller's context variables."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # so that nobody's cancellation makes set_result raise
    context = contextvars.copy_context()
    return future, lambda: future.set_result(context.run(work))


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    # A function without `self`: the thread must not keep its owner alive.
    while (make := queue.get()) is not None:  # stop() posts the None
        make()
        del make  # it holds the call's arguments; the next may be long in coming


def call_when_set(event: threading.Event, function: Callable[[], None]) -> None:
    """Call `function`, in a thread of its own, as soon as the event is set."""

    def wait() -> None:
        event.wait()  # as long as the process, in a daemon thread
        function()

    in_thread(wait, name="stop-watch")
