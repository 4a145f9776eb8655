"""The one thread of an environment's instance: it is constructed there, and all its plain methods run there.

Environments may hold what belongs to a thread (an sqlite connection, a browser, an event loop of a client library), and one
thread also makes sure that no two calls overlap. A daemon: a call that hangs does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class InstanceThread:
    """Runs pieces of work, which must not raise, one after the other.

    Args:
        name: for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()

    def post(self, work: Callable[[], Result]) -> Future[Result]:
        """Put `work` behind what is already there."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # so that nobody's cancellation makes set_result raise
        context = contextvars.copy_context()
        self._queue.put(lambda: future.set_result(context.run(work)))
        return future

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`; it goes on in the thread where this is cancelled or too slow.

        Raises:
            TimeoutError: it took longer than `timeout_s` seconds.
        """
        return await result_within(self.post(work), timeout_s)

    def stop(self) -> None:
        """End the thread after what is already there."""
        self._queue.put(None)


async def result_within(future: Future[Result], timeout_s: float) -> Result:
    """The result of posted work; TimeoutError after `timeout_s` seconds."""
    waiter = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        return waiter.result()
    finally:
        waiter.cancel()


def _work(queue: SimpleQueue[Callable[[], Any] | None]) -> None:
    # A function without `self`: the thread must not keep its owner alive.
    while (work := queue.get()) is not None:  # stop() posts the None
        work()
        del work  # it holds the call's arguments; the next may be long in coming
