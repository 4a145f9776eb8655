"""Hosts an asyncio loop in a thread of the trainer's rank 0.

Invariant: stop() ends in bounded time, even if every task retries forever; the thread is a daemon, so it never keeps the
process alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvloop

from grpo_async.errors import DeadlineError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_MAX_STACKS = 16


def result_within(future: concurrent.futures.Future[Result], *, timeout_s: float, what: str, setting: str) -> Result:
    """The result of a coroutine that runs on another thread's loop.

    Raises:
        DeadlineError: no result within `timeout_s` seconds; the coroutine is cancelled.
    """
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError as error:
        if future.done():  # the coroutine itself raised TimeoutError
            raise
        future.cancel()
        raise DeadlineError(what, waited_s=timeout_s, setting=setting) from error


class LoopThread:
    """An event loop that runs from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="rollout", daemon=True)
        self._spawned: list[concurrent.futures.Future[None]] = []  # the loop itself holds only weak references to tasks

    def start(self) -> None:
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()  # stop() ends it

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Start a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, Result], *, timeout_s: float, what: str, setting: str) -> Result:
        """Run a coroutine on the loop and wait for its result, like `result_within`."""
        return result_within(self.submit(coroutine), timeout_s=timeout_s, what=what, setting=setting)

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, on_error: Callable[[BaseException], None]) -> None:
        """Run a coroutine in the background until it ends or `cancel_all`; an exception goes to `on_error`."""

        def done(finished: concurrent.futures.Future[None]) -> None:
            if not finished.cancelled() and (error := finished.exception(timeout=0.0)) is not None:
                on_error(error)

        self._spawned.append(self.submit(coroutine))
        self._spawned[-1].add_done_callback(done)

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the loop soon."""
        self._loop.call_soon_threadsafe(function)

    def task_stacks(self) -> str:
        """Where the tasks of the loop wait, one line each, for the first 16. Thread-safe, and works when the loop hangs."""
        tasks = sorted(asyncio.all_tasks(self._loop), key=lambda task: task.get_name())
        lines = [f"{task.get_name()}: {' > '.join(_awaits(task.get_coro()))}" for task in tasks[:_MAX_STACKS]]
        if len(tasks) > _MAX_STACKS:
            lines.append(f"and {len(tasks) - _MAX_STACKS} more tasks")
        return "\n".join(lines)

    def cancel_all(self, *, timeout_s: float) -> bool:
        """Cancel every task of the loop and wait until they have ended; False if some did not within `timeout_s`."""

        async def cancel() -> bool:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            return not tasks or not (await asyncio.wait(tasks, timeout=timeout_s))[1]

        try:
            return self.submit(cancel()).result(timeout=timeout_s + 1.0)
        except TimeoutError:
            return False

    def stop(self, *, timeout_s: float) -> None:
        """Cancel everything, stop the loop and join the thread. If it does not end in time, it is abandoned with a warning."""
        if not self._thread.is_alive():
            return
        began = time.monotonic()
        ended = self.cancel_all(timeout_s=timeout_s)
        self.post(self._loop.stop)
        self._thread.join(timeout=max(0.5, timeout_s - (time.monotonic() - began)))
        if self._thread.is_alive() or not ended:
            logger.warning(
                "the rollout thread did not end within %.0f s; it is abandoned "
                "(a reward or tool that blocks the event loop causes this)",
                timeout_s,
            )
        else:
            self._loop.close()


def _awaits(awaitable: object) -> Iterator[str]:
    """The functions that a coroutine is suspended in, outermost first: `_run_group worker.py:130`, `score function.py:162`."""
    while isinstance(awaitable, types.CoroutineType | types.GeneratorType):
        if isinstance(awaitable, types.CoroutineType):
            frame, awaitable = awaitable.cr_frame, awaitable.cr_await
        else:
            frame, awaitable = awaitable.gi_frame, awaitable.gi_yieldfrom
        if frame is not None:
            yield f"{frame.f_code.co_name} {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
