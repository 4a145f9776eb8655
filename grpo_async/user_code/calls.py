"""One call of a user's function: off the event loop if it is a plain one, on it if it is async, always with a time limit.

What the function raises comes back as a value (`Raised`): a SystemExit or KeyboardInterrupt that is raised into an event loop
ends the loop. Context variables of the caller are seen by the function. An async function that blocks (time.sleep) blocks
its loop, which is one of their own for rewards and one for tools and environments (`user_loop`).
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from grpo_async.user_code.loop import UserLoop

Result = TypeVar("Result")


class Threads(Protocol):
    """Where plain functions run: a ThreadRunner, or the one thread of an environment's instance."""

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Run `work`, which does not raise; TimeoutError after `timeout_s` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Raised:
    """What a call raised."""

    error: BaseException

    @property
    def summary(self) -> str:
        """Type and message in one line; KeyError("a") -> `KeyError: 'a'`."""
        kind = type(self.error).__name__
        try:
            message = " ".join(str(self.error).split())
        except Exception as error:  # noqa: BLE001 - the __str__ of a user's exception
            message = f"(its message cannot be read: {type(error).__name__})"
        return f"{kind}: {message}" if message else kind

    @property
    def trace(self) -> str:
        return "".join(traceback.format_exception(self.error))


@dataclass(frozen=True, slots=True)
class UserCall(Generic[Result]):
    """A function, its keyword arguments, and what is made of its result in the same place (a long list takes long to write
    as JSON; and a result's own `__str__` may raise)."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Any], Result] = lambda raw: raw

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    def attempt(self) -> Result | Raised:
        """Call on this thread, with an event loop of its own if the result has to be awaited after all. Never raises."""
        try:
            raw = self.function(**self.arguments)
            if inspect.isawaitable(raw):
                raw = asyncio.run(_awaited(raw))
            return self.finish(raw)
        except BaseException as error:  # noqa: BLE001 - travels as a value, see the top of the module
            return Raised(error)

    async def attempt_async(self) -> Result | Raised:
        """Call on the running loop. Raises only CancelledError, when this task is cancelled."""
        try:
            return self.finish(await self.function(**self.arguments))  # TimedCaller cancels it
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Raised(error)  # the function's own
        except BaseException as error:  # noqa: BLE001 - travels as a value, see the top of the module
            return Raised(error)


class TimedCaller:
    """Makes calls with a time limit.

    Args:
        threads: where plain functions run.
        timeout_s: limit of one call, in seconds.
        loop: where async functions run; None: on the caller's loop, which they can block.
    """

    def __init__(self, threads: Threads, timeout_s: float, *, loop: UserLoop | None = None) -> None:
        self._threads = threads
        self._loop = loop
        self.timeout_s = timeout_s
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def run(self, call: UserCall[Result]) -> Result | Raised:
        """Raises:
        TimeoutError: it took longer; a thread is abandoned, a coroutine cancelled. LoopHeldError: it blocks its own loop.
        ThreadsExhaustedError: too many abandoned threads are still running.
        """
        if not call.is_async:
            return await self._threads.run(call.attempt, self.timeout_s)
        if self._loop is not None:
            return await self._loop.run(call.attempt_async, self.timeout_s)
        task = asyncio.create_task(call.attempt_async())
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
            if not done:
                raise TimeoutError
            return task.result()
        finally:
            if not task.done():
                # Not awaited: a coroutine that swallows its cancellation would outlast the deadline.
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)


def unwrap_partial(function: Any) -> Any:
    """The callable inside (nested) functools.partial objects."""
    while hasattr(function, "func") and hasattr(function, "keywords"):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether `function` is a coroutine function, a partial of one, or an object with an async `__call__`."""
    inner = unwrap_partial(function)
    if inspect.iscoroutinefunction(inner):
        return True
    return not inspect.isroutine(inner) and inspect.iscoroutinefunction(getattr(type(inner), "__call__", None))  # noqa: B004 - a look at its kind


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable  # its thread is given up after the limit
