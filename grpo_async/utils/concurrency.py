"""Coroutines that run at the same time or are closed in turn, and functions in threads that can be abandoned."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def in_thread(function: Callable[[], Result], *, name: str) -> Future[Result]:
    """Run `function` in a daemon thread. A caller whose deadline has passed leaves it behind: it cannot be killed, and unlike a
    thread of an executor it does not keep the process from ending."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def call_when_set(event: threading.Event, function: Callable[[], None]) -> None:
    """Call `function`, in a separate thread, as soon as the event is set."""

    def wait() -> None:
        event.wait()  # may wait forever, in a daemon thread
        function()

    in_thread(wait, name="stop-watch")


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, Result], *, name: str) -> AsyncIterator[asyncio.Task[Result]]:
    """`work` runs while the context is open, and is cancelled when it is left. Its error ends the context at once, and is raised
    there."""
    with _unwrapped():
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work, name=name)
            try:
                yield task
            finally:
                task.cancel()


async def all_of(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of `works`, in their order. When one fails, the others are cancelled and its error is raised."""
    with _unwrapped():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
    return [task.result() for task in running]


async def close_all(closes: Iterable[Callable[[], Awaitable[None]]], *, timeout_s: float) -> None:
    """Close connections and environments in turn, even if one fails or takes longer than `timeout_s`: the work is done, and the
    process ends soon."""
    for close in closes:
        try:
            async with asyncio.timeout(timeout_s):
                await close()
        except TimeoutError:
            logger.warning("connections or environments did not close within %.0f s", timeout_s)
        except Exception:
            logger.exception("connections or environments could not be closed")


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """The first error is raised without the group that asyncio puts around it, and with what it came from."""
    try:
        yield
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
