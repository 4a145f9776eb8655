"""One call of a user's function, always with a time limit: in a thread if it is plain (`threads`), on an event loop
apart from the run's if it is async (`loop`); `workers` runs either in a process, which is killed on timeout.

The function's exceptions leave its thread or loop as a value (`Raised`), because a SystemExit inside an event loop
would end it.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import decimal
import functools
import inspect
import logging
import math
import os
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_async.errors import GrpoAsyncError, with_type
from grpo_async.records import MAX_REWARD
from grpo_async.user_code.threads import BlockedLoopError, InstanceThread, ThreadRunner, ThreadsExhaustedError, UserLoop
from grpo_async.utils.safe_text import safe_repr
from grpo_async.utils.text import clipped
from grpo_async.utils.warn_once import WarnOnce

Result = TypeVar("Result")


class CallError(GrpoAsyncError):
    """A call of a user's function gave no result. `problem` ends a sentence that begins with the function: "raised KeyError: 'a'
    (mine.py, line 7)". `error` is None if it did not end, or raised what cannot be pickled; `is_lost`: it or its process ended or
    took too long."""

    def __init__(
        self, problem: str, *, error: BaseException | None = None, is_timeout: bool = False, is_lost: bool = False
    ) -> None:
        self.problem, self.error = problem, error
        self.is_timeout, self.is_lost = is_timeout, is_timeout or is_lost
        super().__init__(problem)

    @property
    def origin(self) -> BaseException:
        """The cause for `raise ... from`."""
        return self.error or self


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception of a call."""

    error: BaseException

    @property
    def summary(self) -> str:
        """Type and message in one line; KeyError("a") -> `KeyError: 'a'`."""
        return " ".join(with_type(self.error).split())

    @property
    def problem(self) -> str:
        """See `CallError.problem`."""
        if isinstance(self.error, CallError):  # from a worker process
            return self.error.problem
        return f"raised {self.summary}{self.place}"

    @property
    def traceback(self) -> str:
        return "".join(traceback.format_exception(self.error))

    @property
    def place(self) -> str:
        """The user's file and line, even if a library raised: " (/home/me/env.py, line 7)"; "" if no function
        ran, as with wrong arguments."""
        stack = traceback.extract_tb(self.error.__traceback__)[1:]  # without the frame that caught it
        theirs = [frame for frame in stack if not _is_library(frame.filename)] or stack
        return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


@dataclass(frozen=True, slots=True)
class UserCall(Generic[Result]):
    """A function, its keyword arguments, and `finish`, which converts its result in the same place (converting a long list to JSON
    takes long, and a result's own `__str__` may raise). The function gets copies of `arguments`, so that it cannot change
    what others see, and the objects in `live` themselves."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Any], Result] = lambda raw: raw
    live: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    def attempt(self) -> Result | Raised:
        """Call on this thread, with a new event loop if the result must be awaited after all. Never raises."""
        try:
            raw = self.function(**own_copy(self.arguments), **self.live)
            if inspect.isawaitable(raw):
                raw = asyncio.run(_awaited(raw))
            return self.finish(raw)
        except BaseException as error:  # noqa: BLE001 - passed as a value, see the top of the module
            return Raised(error)

    async def attempt_async(self) -> Result | Raised:
        """Call on the running loop. Raises only CancelledError, when this task is cancelled."""
        try:
            return self.finish(
                await self.function(**own_copy(self.arguments), **self.live)
            )  # Caller cancels it on timeout
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Raised(error)  # raised by the function itself
        except BaseException as error:  # noqa: BLE001 - passed as a value, see the top of the module
            return Raised(error)


class Caller:
    """Makes calls with a time limit."""

    def __init__(
        self, threads: ThreadRunner | InstanceThread, timeout_s: float, *, loop: UserLoop | None = None
    ) -> None:
        self._threads = threads
        self._loop = loop or UserLoop("async calls")
        self.timeout_s = timeout_s

    async def run(self, call: UserCall[Result]) -> Result:
        """Make the call. CallError: it raised, took too long (its thread is abandoned or its coroutine cancelled), or cannot be
        called."""
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
            if isinstance(result.error, CallError):
                raise result.error
            raise CallError(result.problem, error=result.error) from result.error
        return result


_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _is_library(file: str) -> bool:
    """Whether the file belongs to Python, an installed library, or this package; "<frozen importlib._bootstrap>" is Python's."""
    return file.startswith(("<", *(f"{folder}{os.sep}" for folder in _LIBRARIES)))


def partials_of(function: Any) -> Iterator[functools.partial[Any]]:
    """The (nested) functools.partial objects around a callable, from the outside in."""
    while isinstance(function, functools.partial):
        yield function
        function = function.func


def unwrap_partial(function: Any) -> Any:
    """The callable inside (nested) functools.partial objects."""
    for partial in partials_of(function):
        function = partial.func
    return function


def own_name(function: Callable[..., Any]) -> str:
    """`__name__` of a function (of a partial's inner one), or the class name of a callable object."""
    inner = unwrap_partial(function)
    name = getattr(inner, "__name__", None)
    return name if isinstance(name, str) else type(inner).__name__


def process_hint(error: BaseException | None, setting: str) -> str:
    """What to do about `signal.signal` outside the main thread, as an example of TRL calls it; "" for every other error."""
    if isinstance(error, ValueError) and "main thread" in str(error):
        return f"; set `{setting}.run_in: process`: worker processes run it in their main thread"
    return ""


NO_SIGNATURE = "has no signature that can be read; wrap it in a `def`"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The keyword arguments of a signature."""

    names: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()  # without a default
    takes_any: bool = True  # has **kwargs, or the signature cannot be read
    by_position: tuple[str, ...] = ()  # positional-only, without a default

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Read the signature of `function`; ValueError if it has none, like some builtins."""
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
    """Convert a reward that a user's function returned: a number of any library, or None."""
    if hasattr(value, "tolist"):  # numpy scalar; tensor with one element
        value = value.tolist()
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
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
    """Convert the result of a user's function for `count` things (a list, tensor, generator, ...) to finite floats or Nones.

    Args:
        of: the thing that has one number each: "completion".
    """
    if not isinstance(raw, Iterable) or isinstance(raw, (str, bytes, Mapping, Set)) or getattr(raw, "ndim", 1) == 0:
        raise ValueError(f"returned {shown(raw)}; it must return a list with one number or None per {of}")
    raw = list(raw)
    if len(raw) != count:
        raise ValueError(f"returned {len(raw)} values for {count} {of}s; it must return one per {of}")
    values: list[float | None] = []
    for index, value in enumerate(raw):
        try:
            values.append(read_number(value))
        except ValueError as error:
            raise ValueError(f"returned for {of} {index}: {error}") from error
    return values


def shown(value: Any) -> str:
    """The value and its type in a few words, for errors."""
    return f"{clipped(safe_repr(value))} ({type(value).__name__})"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether `function` is a coroutine function, a partial of one, or an object with an async `__call__`."""
    inner = unwrap_partial(function)
    if inspect.iscoroutinefunction(inner):
        return True
    return not inspect.isroutine(inner) and inspect.iscoroutinefunction(getattr(type(inner), "__call__", None))  # noqa: B004 - a look at its kind


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable  # its thread is abandoned after the limit


# ------------------------------------------------------------------------- what a user's code may touch: copies

_warn = WarnOnce(logging.getLogger(__name__))
_IMMUTABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, decimal.Decimal}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta}
)


def own_copy(value: Any) -> Any:
    """Return a copy that shares nothing mutable with `value`, whatever containers it holds.

    Two entries of a list that are one object become two: [row] * 2 -> [copy, copy]. A list of numbers or texts, such as
    token ids, costs one pass over it. What refuses to be copied (a lock, a connection, a tensor with a graph), which only a
    user's own code can have made, stays shared, with a warning for each type.
    """
    try:
        return _copied(value)
    except RecursionError:  # a container that holds itself
        return copy.deepcopy(value)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list or kind is tuple:
        if _IMMUTABLE.issuperset(map(type, value)):
            return value[:]
        return kind([_copied(item) for item in value])
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception as error:  # noqa: BLE001 - a class may refuse with anything
        _warn(str(kind), "calls of your code share one %s, which cannot be copied: %s", kind.__qualname__, error)
        return value
