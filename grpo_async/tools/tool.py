"""One tool, what the model sees of it and how it is called; and `ToolExecutor`, which answers all calls of a turn."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo_async.config.sections import ToolSection
from grpo_async.errors import ConfigError, GrpoAsyncError, Problems
from grpo_async.records import ToolCall, ToolCallRecord
from grpo_async.tools.results import ToolError, ToolResult, error_text, truncate
from grpo_async.tools.schema import ToolSpec, UnusableError, build_spec, check_arguments
from grpo_async.user_code.calls import NO_SIGNATURE, Caller, CallError, Raised, Result, UserCall, process_hint
from grpo_async.user_code.references import resolve_function
from grpo_async.user_code.threads import ThreadRunner, UserLoop
from grpo_async.user_code.workers import START_TIMEOUT_S, WorkerPool, remote_function
from grpo_async.utils.text import clipped, did_you_mean, duplicates
from grpo_async.utils.warn_once import WarnOnce

logger = logging.getLogger(__name__)

# Every rollout in flight may call the same tool, and most tools wait for something.
_MAX_THREADS = 64
ASYNC_LOOP = UserLoop("async tools")
"""One loop for all async tools and async methods of environments: an HTTP client or lock that two share belongs to one loop."""


class _Caller(Protocol):
    """What runs a tool's calls: a Caller, or the environment that the tool belongs to."""

    async def run(self, call: UserCall[Result]) -> Result:
        """Run a call. CallError: it raised, or took too long; another GrpoAsyncError: it cannot be made at all."""
        ...


class Tool:
    """A typed function that the model may call."""

    def __init__(
        self,
        function: Callable[..., Any],
        spec: ToolSpec,
        caller: _Caller,
        *,
        fixed: Mapping[str, Any] | None = None,
        setting: str = "tools",
        warn: WarnOnce | None = None,
    ) -> None:
        self.function = function
        self._spec = spec
        self._caller = caller
        self.fixed = dict(fixed or {})
        self._setting = setting
        self.close: Callable[[], None] = lambda: None
        """Ends its worker processes."""
        self._warn = warn or WarnOnce(logger)

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
        reference: str | None = None,
        setting: str = "tools",
    ) -> Tool:
        """Make a tool of a function: plain functions run in threads, async ones on the loop of the tools, or, with a `reference`
        (`module:attribute` of the function), either in worker processes.
        """
        spec = build_spec(function, hidden=set(arguments or {}))
        pool = None if reference is None else WorkerPool(f"tool {spec.name}", reference)
        if pool is not None:
            function, timeout_s = remote_function(function, pool, timeout_s), timeout_s + START_TIMEOUT_S
        threads = ThreadRunner(f"tool-{spec.name}", max_threads=_MAX_THREADS if pool is None else pool.size)
        tool = cls(function, spec, Caller(threads, timeout_s, loop=ASYNC_LOOP), fixed=arguments, setting=setting)
        if pool is not None:
            tool.close = pool.close
        return tool

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def schema(self) -> Mapping[str, Any]:
        """As `apply_chat_template(tools=...)` takes it."""
        return self._spec.schema

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """The function's result."""
        checked = check_arguments(self._spec.validator, self._spec.parameters, arguments)
        try:
            result = await self._caller.run(UserCall(self.function, self.fixed, ToolResult.of, live=checked))
        except CallError as error:
            origin = error.origin
            raised = Raised(origin)
            if error.error is None:
                raise self._failed(origin, error.problem, error.problem) from origin
            told = str(origin) if isinstance(origin, ToolError) else raised.summary
            raise self._failed(origin, told, f"{raised.summary}\n{raised.traceback.rstrip()}") from origin
        except GrpoAsyncError as error:
            raise self._failed(error, str(error), str(error)) from error
        return result

    def _failed(self, error: BaseException, told: str, logged: str) -> ToolError:
        text = "tool `%s`: %s\n(further failures of this kind are told to the model only)"
        self._warn((self.name, type(error)), text, self.name, f"{logged}{process_hint(error, self._setting)}")
        return ToolError(told)


def tools_of_row(tools: Sequence[Tool], columns: Mapping[str, Any]) -> list[Tool]:
    """The tools that a row's column `tools` names, [] for none; all where it has no such column, or null there."""
    names, known = columns.get("tools"), [tool.name for tool in tools]
    if not tools or names is None:
        return list(tools)
    if not isinstance(names, list) or any(name not in known for name in names):
        raise ConfigError(
            f"the column `tools` lists names of the run's tools that the row may use, {known}; it is {clipped(repr(names), 80)}. "
            "If it means something else, leave it out with `remove_columns: [tools]`"
        )
    return [tool for tool in tools if tool.name in names]


def load_tools(sections: Sequence[ToolSection]) -> list[Tool]:
    """The tools of the config's `tools` sections, imported and checked. Starts no thread.

    Raises:
        ConfigError: some tool cannot be found, imported, called as configured or described to a model; one line per problem.
    """
    tools: list[Tool] = []
    problems = Problems()
    for index, section in enumerate(sections):
        with problems.collecting():
            tools.append(_load(section, f"tools.{index}"))
    names = [tool.name for tool in tools]
    problems.extend(
        f"tools: the name `{name}` belongs to more than one function; rename one of them" for name in duplicates(names)
    )
    problems.raise_if_any()
    return tools


def _load(section: ToolSection, path: str) -> Tool:
    where = f"{path}.function: {section.function}"
    function = resolve_function(section.function, where)
    problems = Problems()
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError as error:
        raise ConfigError(f"{where}: {NO_SIGNATURE}") from error
    for argument in section.arguments:
        if argument not in names:
            takes = f"it takes {names}" if names else "it takes no arguments"
            problems.append(f"{path}.arguments.{argument}: {section.function} takes no `{argument}`; {takes}")
    try:
        tool = Tool.from_function(
            function,
            arguments=section.arguments,
            timeout_s=section.timeout_s,
            reference=section.function if section.run_in == "process" else None,
            setting=path,
        )
    except UnusableError as error:
        problems.extend(f"{where}: {problem}" for problem in error.problems)
    problems.raise_if_any()
    return tool


# A policy that repeats itself can write hundreds of calls into one turn. Their results would fill any context, and the
# calls would occupy all threads; nobody needs more than this at once.
MAX_CALLS_PER_TURN = 32


class ToolExecutor:
    """Calls the tools of one rollout."""

    def __init__(self, tools: Sequence[Tool], *, max_result_chars: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"tools need different names, got {sorted(tool.name for tool in tools)}")
        self._max_result_chars = max_result_chars

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The JSON schemas of the tools."""
        return [tool.schema for tool in self._tools.values()]

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolCallRecord]:
        """One record for each call, in their order. Raises only CancelledError."""
        made, left = calls[:MAX_CALLS_PER_TURN], calls[MAX_CALLS_PER_TURN:]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._execute_one(call)) for call in made]
        limit = ToolError(f"too many calls in one turn; only the first {MAX_CALLS_PER_TURN} were made")
        return [*(task.result() for task in tasks), *(self._record(call, limit, 0.0) for call in left)]

    async def _execute_one(self, call: ToolCall) -> ToolCallRecord:
        started = time.monotonic()
        try:
            tool = self._tool_for(call)
            outcome: ToolResult | ToolError = await tool.call(call.arguments)
        except ToolError as error:
            outcome = error
        return self._record(call, outcome, time.monotonic() - started)

    def _tool_for(self, call: ToolCall) -> Tool:
        if call.error is not None:
            raise ToolError(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            hint = did_you_mean(call.name, self._tools)
            raise ToolError(
                f"there is no tool {clipped(call.name)!r}; there is {', '.join(self._tools) or 'none'}{hint}"
            )
        return tool

    def _record(self, call: ToolCall, outcome: ToolResult | ToolError, duration_s: float) -> ToolCallRecord:
        failed = isinstance(outcome, ToolError)
        text = str(outcome) if isinstance(outcome, ToolError) else outcome.text
        as_shown = error_text if failed else truncate
        return ToolCallRecord(
            tool_call_id=call.tool_call_id,
            name=call.name,
            arguments=dict(call.arguments),
            result=as_shown(text, self._max_result_chars),
            returned=None if isinstance(outcome, ToolError) else outcome.returned,
            failed=failed,
            duration_s=duration_s,
        )
