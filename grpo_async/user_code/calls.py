"""One call of a user's function: off the event loop if it is a plain one, on it if it is async, always with a time limit.

    await Caller(...).run(UserCall(function, arguments)) -> its result, or a CallError that says what happened
      |- async function   on an event loop of its own kind     `loop`     cancelled on timeout, abandoned if it blocks
      |- plain function   in a thread                          `threads`  abandoned on timeout
      `- WorkerPool.run   in a process                         `workers`  killed on timeout

What the function raises leaves its thread or loop as a value (`Raised`): a SystemExit or KeyboardInterrupt that is raised into an
event loop ends the loop. Context variables of the caller are seen by the function. An async function that blocks (time.sleep)
blocks its own loop and not the run's. There is a loop for rewards, one for tools and environments, one for rollout functions,
and one for agents.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_async.errors import GrpoAsyncError
from grpo_async.records import MAX_REWARD
from grpo_async.user_code.loop import BlockedLoopError, UserLoop
from grpo_async.user_code.threads import InstanceThread, ThreadRunner, ThreadsExhaustedError
from grpo_async.utils.text import clipped

Result = TypeVar("Result")


class CallError(GrpoAsyncError):
    """A call of a user's function gave no result.

    Attributes:
        problem: what happened, as the end of a sentence that begins with the function: "raised KeyError: 'a' (mine.py, line 7)".
        error: what it raised; None where it did not end, could not be called, or raised what cannot leave its process.
        is_timeout: it took too long.
        is_lost: it took too long, or its process ended.
    """

    def __init__(
        self, problem: str, *, error: BaseException | None = None, is_timeout: bool = False, is_lost: bool = False
    ) -> None:
        self.problem, self.error = problem, error
        self.is_timeout, self.is_lost = is_timeout, is_timeout or is_lost
        super().__init__(problem)

    @property
    def origin(self) -> BaseException:
        """What to raise an error of our own `from`."""
        return self.error or self


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

    @property
    def place(self) -> str:
        """The user's file and line, which may have called a library that raised: " (/home/me/env.py, line 7)"; "" where there is
        no traceback."""
        stack = traceback.extract_tb(self.error.__traceback__)
        theirs = [frame for frame in stack if not _is_library(frame.filename)] or stack
        return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


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
            return self.finish(await self.function(**self.arguments))  # Caller cancels it
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Raised(error)  # the function's own
        except BaseException as error:  # noqa: BLE001 - travels as a value, see the top of the module
            return Raised(error)


class Caller:
    """Makes calls with a time limit.

    Args:
        threads: where plain functions run.
        timeout_s: limit of one call, in seconds.
        loop: where async functions run; None: on one of their own.
    """

    def __init__(
        self, threads: ThreadRunner | InstanceThread, timeout_s: float, *, loop: UserLoop | None = None
    ) -> None:
        self._threads = threads
        self._loop = loop or UserLoop("async calls")
        self.timeout_s = timeout_s

    async def run(self, call: UserCall[Result]) -> Result:
        """CallError: it raised, took too long (a thread is abandoned, a coroutine cancelled), or cannot be called."""
        too_long = f"took longer than {self.timeout_s:g} s"
        try:
            if call.is_async:
                result = await self._loop.run(call.attempt_async, self.timeout_s)
            else:
                result = await self._threads.run(call.attempt, self.timeout_s)
        except BlockedLoopError as error:
            why = f"blocks its event loop at {error.where}; an async function must `await` what takes time"
            raise CallError(f"{too_long}, and {why}", is_timeout=True) from error
        except TimeoutError as error:
            raise CallError(too_long, is_timeout=True) from error
        except ThreadsExhaustedError as error:
            raise CallError(f"cannot be called: {error}") from error
        if isinstance(result, Raised):
            raise CallError(f"raised {result.summary}{result.place}", error=result.error) from result.error
        return result


_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _is_library(file: str) -> bool:
    """Python's own, an installed one, or this package; "<frozen importlib._bootstrap>" has no file."""
    return file.startswith(("<", *(f"{folder}{os.sep}" for folder in _LIBRARIES)))


def unwrap_partial(function: Any) -> Any:
    """The callable inside (nested) functools.partial objects."""
    while hasattr(function, "func") and hasattr(function, "keywords"):
        function = function.func
    return function


def own_name(function: Callable[..., Any]) -> str:
    """`__name__` of a function (of the inner one of a partial), else the class name of a callable object."""
    inner = unwrap_partial(function)
    name = getattr(inner, "__name__", None)
    return name if isinstance(name, str) else type(inner).__name__


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a signature says about keyword arguments."""

    names: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()  # without a default
    takes_any: bool = True  # has **kwargs, or cannot be read
    by_position: tuple[str, ...] = ()  # without a default, and cannot be given by name

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """ValueError where the signature cannot be read: of some builtins."""
        parameters = inspect.signature(function).parameters.values()
        keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            names=frozenset(p.name for p in keywords),
            required=frozenset(p.name for p in keywords if p.default is p.empty),
            takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
            by_position=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty),
        )

    def accepts(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def missing(self, given: Collection[str]) -> list[str]:
        """Required names that are not among those given, sorted."""
        return sorted(self.required.difference(given))

    def choose(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.accepts(name)}


def read_number(value: Any) -> float | None:
    """What a user's function returned as a reward: a number of any library, or None.

    Raises:
        ValueError: it is none, or no finite one; the text continues "returned": "'good' (str); it must be a number or None".
    """
    if hasattr(value, "tolist"):  # numpy scalar, 0-dimensional tensor
        value = value.tolist()
    if value is None:
        return None
    if not isinstance(value, (bool, int, float)):
        raise ValueError(f"{shown(value)}; it must be a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:
        raise ValueError(f"{number:g}; it must be a number of at most {MAX_REWARD:g}, or None where it does not apply")
    return number


def read_numbers(raw: Any, count: int, *, of: str) -> list[float | None]:
    """What a user's function returned for `count` things (list, tuple, tensor or array), as finite floats or Nones.

    Args:
        of: what there is one number for: "completion".

    Raises:
        ValueError: it is something else; the text continues the function's name, and names the index.
    """
    if hasattr(raw, "tolist"):
        raw = raw.tolist()
    if not isinstance(raw, (list, tuple)):
        raise ValueError(f"returned {shown(raw)}; it must return a list with one number or None per {of}")
    if len(raw) != count:
        raise ValueError(f"returned {len(raw)} values for {count} {of}s; it must return one per {of}")
    values: list[float | None] = []
    for index, value in enumerate(raw):
        try:
            values.append(read_number(value))
        except ValueError as error:
            raise ValueError(f"for {of} {index} it returned {error}") from error
    return values


def shown(value: Any) -> str:
    """Value and type in a few words, for errors."""
    return f"{clipped(repr(value))} ({type(value).__name__})"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether `function` is a coroutine function, a partial of one, or an object with an async `__call__`."""
    inner = unwrap_partial(function)
    if inspect.iscoroutinefunction(inner):
        return True
    return not inspect.isroutine(inner) and inspect.iscoroutinefunction(getattr(type(inner), "__call__", None))  # noqa: B004 - a look at its kind


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable  # its thread is given up after the limit
