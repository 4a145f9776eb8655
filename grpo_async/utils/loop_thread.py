"""An asyncio loop in a daemon thread, which never keeps the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import types
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_async.errors import DeadlineError
from grpo_async.utils.text import count

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_MAX_STACKS = 16


def result_within(future: Future[Result], *, timeout_s: float, what: str, setting: str) -> Result:
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
    """A loop that runs until `stop`; then it cancels its tasks, and closes when they have ended."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._is_stopping = False
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the loop soon; no effect if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def task_stacks(self) -> str:
        """Where the tasks of the loop wait, one line each, for the first 16. Thread-safe, and works when the loop hangs."""
        tasks = sorted(asyncio.all_tasks(self.loop), key=lambda task: task.get_name())
        lines = [f"{task.get_name()}: {' > '.join(_awaits(task.get_coro()))}" for task in tasks[:_MAX_STACKS]]
        if len(tasks) > _MAX_STACKS:
            lines.append(f"and {count(len(tasks) - _MAX_STACKS, 'more task')}")
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

    def stop(self) -> None:
        """Stop the loop as soon as no function blocks it. Does not wait: join `thread`, which a stubborn task keeps alive."""
        self._is_stopping = True
        self.post(self.loop.stop)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._is_stopping:
                self._run_until_exit()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def _run_until_exit(self) -> None:
        """Run until the loop is stopped, or until a task calls `sys.exit`: asyncio lets that exception leave the loop, and the
        caller runs the loop again for the other tasks."""
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning(
                "a task in the event loop of %s raised %r, which ended that task only", self.thread.name, error
            )


def _awaits(awaitable: object) -> Iterator[str]:
    """The functions that a coroutine is suspended in, outermost first: `_run_group worker.py:130`, `score function.py:162`."""
    while isinstance(awaitable, types.CoroutineType | types.GeneratorType):
        if isinstance(awaitable, types.CoroutineType):
            frame, awaitable = awaitable.cr_frame, awaitable.cr_await
        else:
            frame, awaitable = awaitable.gi_frame, awaitable.gi_yieldfrom
        if frame is not None:
            yield f"{frame.f_code.co_name} {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
