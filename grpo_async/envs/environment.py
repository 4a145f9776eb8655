"""One instance of an environment, as a rollout uses it, and `EnvironmentKind`, the description of its class.

Calls of one instance never overlap. A cancelled caller does not interrupt a call; after a timeout the instance is
`broken`. Only methods are inspected, through the class: a property of an instance is never read. Tools are the public
methods except reserved ones; static methods are helpers, as in TRL.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_async.config.sections import EnvironmentSection
from grpo_async.data.rows import ENVIRONMENT_COLUMN
from grpo_async.errors import GrpoAsyncError
from grpo_async.tools.results import encodable, joined_parts
from grpo_async.tools.schema import ToolSpec, UnusableError, build_spec
from grpo_async.tools.tool import ASYNC_LOOP, Tool
from grpo_async.user_code.calls import (
    Caller,
    CallError,
    Parameters,
    Raised,
    Result,
    UserCall,
    process_hint,
    read_number,
    shown,
)
from grpo_async.user_code.threads import InstanceThread
from grpo_async.utils.warn_once import WarnOnce

logger = logging.getLogger(__name__)

RESERVED = frozenset({"reset", "is_done", "get_reward", "close"})
_OPTIONAL = ("is_done", "get_reward", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """One configured environment."""

    name: str
    factory: Callable[..., Any]
    section: EnvironmentSection
    environment_class: type
    specs: Mapping[str, ToolSpec]  # by the method's name
    reset_parameters: Parameters  # which columns `reset` takes
    methods: frozenset[str]  # which of is_done, get_reward and close exist
    selected_by_column: bool  # the column `environment` chose it; then the environment does not get that column
    notes: tuple[str, ...] = ()
    warn_once: WarnOnce = field(default_factory=lambda: WarnOnce(logger))

    @property
    def timeout_s(self) -> float:
        return self.section.timeout_s

    @property
    def setting(self) -> str:
        return f"environments.{self.name}"

    @property
    def reward_name(self) -> str | None:
        """Name of its reward in the metrics: the class's, as in TRL; None without `get_reward`."""
        return self.environment_class.__name__ if "get_reward" in self.methods else None

    def reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What `reset` gets of a row (its columns and its `prompt`): all of them if it takes **kwargs, otherwise those that it
        names. The column `environment` is left out if it chose the environment.
        """
        if self.selected_by_column:
            row = {name: value for name, value in row.items() if name != ENVIRONMENT_COLUMN}
        missing = self.reset_parameters.missing(row)
        if missing:
            raise EnvironmentCallError(
                self.name,
                f"`reset` needs the column(s) {missing}, but the row has {sorted(row)}; rename with "
                "`data.train.columns`, or give them a default",
            )
        return self.reset_parameters.choose(row)


def examine(
    probe: Any, *, name: str, factory: Callable[..., Any], section: EnvironmentSection, selected_by_column: bool
) -> EnvironmentKind:
    """Check a new instance of an environment."""
    problems: list[str] = []
    notes: list[str] = []
    parameters = _reset_parameters(probe, problems)
    specs = {}
    for method_name in _public_methods(probe):
        try:
            specs[method_name] = build_spec(getattr(probe, method_name), name=method_name)
        except UnusableError as error:
            problems.extend(
                f"`{method_name}` is a public method, so a tool, but {problem}; or begin its name with `_`"
                for problem in error.problems
            )
    methods = frozenset(optional for optional in _OPTIONAL if _has_method(probe, optional))
    for optional in sorted(set(_OPTIONAL) - methods):
        if inspect.getattr_static(probe, optional, None) is not None:
            notes.append(f"`{optional}` is not a method, so it is not called")
    if section.reward_weight != 1.0 and "get_reward" not in methods:
        notes.append("`reward_weight` has no effect, because there is no `get_reward`")
    if problems or parameters is None:
        raise UnusableError(problems)
    return EnvironmentKind(
        name=name,
        factory=factory,
        section=section,
        environment_class=type(probe),
        specs=specs,
        reset_parameters=parameters,
        methods=methods,
        selected_by_column=selected_by_column,
        notes=tuple(f"environments.{name}: {note}" for note in notes),
    )


def _reset_parameters(probe: Any, problems: list[str]) -> Parameters | None:
    if not _has_method(probe, "reset"):
        problems.append(f"makes a {type(probe).__name__}, which has no method `reset(**row)`; write one")
        return None
    try:
        parameters = Parameters.of(probe.reset)
    except ValueError:
        return Parameters()
    if parameters.by_position:
        problems.append(
            f"has a `reset` that takes {list(parameters.by_position)} by position only; it is called with keywords: "
            "remove the `/`"
        )
    return parameters


def _public_methods(probe: Any) -> list[str]:
    names = [name for name in dir(type(probe)) if not name.startswith("_") and name not in RESERVED]
    return [name for name in names if _is_method(probe, name)]


def _is_method(probe: Any, name: str) -> bool:
    """Whether the attribute is a bound method: functions, class methods, and decorated ones (lru_cache)."""
    attribute = inspect.getattr_static(type(probe), name)
    if inspect.isfunction(attribute) or isinstance(attribute, classmethod):
        return True
    # A property can be read but not called, so no computed value passes this check.
    binds = (
        callable(attribute) and hasattr(type(attribute), "__get__") and not isinstance(attribute, (staticmethod, type))
    )
    return binds and inspect.ismethod(getattr(probe, name))


def _has_method(probe: Any, name: str) -> bool:
    """Whether the method exists, without running a property; any callable counts."""
    found = inspect.getattr_static(probe, name, None)
    return callable(found) or isinstance(found, (staticmethod, classmethod))


MAX_RESET_CHARS = 1_000_000
"""Maximum length of the text that `reset` returns: far above every context, and far below a length that takes minutes to
tokenize."""


class EnvironmentCallError(GrpoAsyncError):
    """A call of an environment's instance failed; only the rollouts that use the instance are lost."""

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"environment `{name}`: {problem}")


class Environment:
    """Calls the methods of one instance."""

    def __init__(self, instance: Any, kind: EnvironmentKind, thread: InstanceThread) -> None:
        self.instance = instance
        self.broken: str | None = None
        """Why the instance can no longer be used."""
        self.kind = kind
        self._thread = thread
        self._caller = Caller(thread, kind.timeout_s, loop=ASYNC_LOOP)
        self._is_done: Callable[[], Any] | None = instance.is_done if "is_done" in kind.methods else None
        self._running: asyncio.Task[Any] | None = None
        self._lock = asyncio.Lock()  # held while a call runs
        self.tools = [
            Tool(getattr(instance, name), spec, self, setting=kind.setting, warn=kind.warn_once)
            for name, spec in kind.specs.items()
        ]

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin an episode; returns the text that is added to the prompt.

        `reset` gets its own copy of what it takes of the row; see `EnvironmentKind.reset_arguments`.

        Raises:
            EnvironmentCallError: the row lacks a column; or `reset` raised, took too long or did not return text, and
                then the instance is broken.
        """
        arguments = self.kind.reset_arguments(row)
        try:
            return await self._call("reset", UserCall(self.instance.reset, arguments, _reset_text))
        except EnvironmentCallError as error:
            self.broken = self.broken or error.problem  # partly reset, so its state is unknown
            raise

    async def is_done(self) -> bool:
        """Whether the episode is over; False for an environment that has no `is_done`."""
        if self._is_done is None:
            self._refuse_if_broken()
            return False
        return await self._call("is_done", UserCall(self._is_done, finish=bool))

    async def get_reward(self) -> float | None:
        """The environment's reward of the episode; None = no reward. Only for one with a `kind.reward_name`."""
        return await self._call("get_reward", UserCall(self.instance.get_reward, finish=_reward))

    async def run(self, call: UserCall[Result]) -> Result:
        """Run one call of the instance, after earlier calls; with this method the instance is the caller of its tools.

        Raises:
            CallError: the call raised, or took too long; then the instance is broken.
            EnvironmentCallError: the instance was already broken.
        """
        await self._lock.acquire()  # the previous call has a limit; if cancelled here, nothing was started
        if self.broken is not None:
            self._lock.release()
            self._refuse_if_broken()
        # A separate task continues if the caller is cancelled. Event loops hold only weak references to tasks.
        task = self._running = asyncio.create_task(self._run(call))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting anymore
        task.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(task)  # the call has a limit

    async def wait_idle(self) -> None:
        """Wait for the running call, if any; its own time limit bounds this."""
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=self.kind.timeout_s + 1.0)

    @property
    def is_idle(self) -> bool:
        """Whether no call is running."""
        return self._running is None or self._running.done()

    async def aclose(self) -> None:
        """End the instance and its thread, within the time limit of a call. Failures are logged, not raised."""
        freed = asyncio.wrap_future(self.discard())
        done, _ = await asyncio.wait({freed}, timeout=self.kind.timeout_s)
        if not done:
            logger.warning("environment `%s`: `close` took longer than %g s", self.kind.name, self.kind.timeout_s)

    def discard(self) -> Future[None]:
        """End the instance without waiting: `close` runs after a call that hangs in the instance's thread. The future is done when
        the thread is free and `close` has ended, which has the time limit of every call if it is async."""
        self.broken = self.broken or "it was closed"
        freed = self._thread.post(lambda: close_instance(self.instance, self.kind.name, self.kind.timeout_s))
        self._thread.stop()
        return freed

    async def _call(self, method: str, call: UserCall[Result]) -> Result:
        try:
            return await self.run(call)
        except CallError as error:
            problem = f"`{method}` {error.problem}{process_hint(error.error, self.kind.setting)}"
            if isinstance(error.error, _BadResultError):
                problem = f"`{method}` returned {error.error}"
            elif error.is_timeout:
                problem = self.broken or problem
            raise EnvironmentCallError(self.kind.name, problem) from error.origin

    async def _run(self, call: UserCall[Result]) -> Result:
        try:
            return await self._caller.run(call)
        except CallError as error:
            if error.is_lost:
                method = getattr(call.function, "__name__", "a call")
                hint = f"; raise `{self.kind.setting}.timeout_s` if this is expected" if error.is_timeout else ""
                self.broken = f"`{method}` {error.problem}{hint}"
            raise
        except asyncio.CancelledError:  # the event loop is ending
            self.broken = self.broken or "a call was cut off"
            raise

    def _refuse_if_broken(self) -> None:
        if self.broken is not None:
            raise EnvironmentCallError(self.kind.name, f"this instance can no longer be used: {self.broken}")


def close_instance(instance: Any, name: str, timeout_s: float) -> None:
    """Call `close` of an instance of the environment `name`, if it has one. For its own thread; failures are logged, not raised."""
    if not _has_method(instance, "close"):
        return
    call: UserCall[Any] = UserCall(instance.close)
    try:
        result = ASYNC_LOOP.post(call.attempt_async).result(timeout_s) if call.is_async else call.attempt()
    except TimeoutError:
        logger.warning("environment `%s`: `close` took longer than %g s", name, timeout_s)
        return
    except GrpoAsyncError as error:
        logger.warning("environment `%s`: `close` could not be called: %s", name, error)
        return
    if isinstance(result, Raised):
        logger.warning("environment `%s`: `close` %s", name, result.problem)


class _BadResultError(Exception):
    """A method returned something unusable; the text says what, and what is expected."""


def _reset_text(raw: Any) -> str | None:
    if raw is None:
        return None
    try:
        text = str(raw) if isinstance(raw, str) else joined_parts(raw)
    except ValueError as error:
        raise _BadResultError(f"something unusable: {error}") from error
    if text is None:
        raise _BadResultError(f"{shown(raw)}; it must return text, a list of text parts, or None")
    if len(text) > MAX_RESET_CHARS:
        raise _BadResultError(
            f"{len(text):,} characters; a prompt holds at most {MAX_RESET_CHARS:,} of them: return less, or cut it"
        )
    return encodable(text)


def _reward(raw: Any) -> float | None:
    try:
        return read_number(raw)
    except ValueError as error:
        raise _BadResultError(str(error)) from error
