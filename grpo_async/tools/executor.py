"""Makes the calls of one turn and records them.

Every call is answered, in the order of the calls: with the tool's text, or with {"error": ...} and `failed`. Calls run
concurrently; an environment's instance has its own calls wait for each other, in their order. Cancelling `execute` gives up the
calls that run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from grpo_async.records import ToolCall, ToolCallRecord
from grpo_async.tools.results import ToolError, cut, error_text
from grpo_async.tools.tool import Tool
from grpo_async.utils.text import clipped, did_you_mean

# A policy that repeats itself can write hundreds of calls into one turn. Their results would fill any context, and the
# calls all the threads; nobody needs more than this at once.
MAX_CALLS_PER_TURN = 32


class ToolExecutor:
    """Calls the tools of one rollout.

    Args:
        tools: with different names.
        max_result_chars: longer results are truncated, with a note that says so.
    """

    def __init__(self, tools: Sequence[Tool], *, max_result_chars: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"tools need different names, got {sorted(tool.name for tool in tools)}")
        self._max_result_chars = max_result_chars

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
            outcome: str | ToolError = await self._tool_for(call).call(call.arguments)
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

    def _record(self, call: ToolCall, outcome: str | ToolError, duration_s: float) -> ToolCallRecord:
        failed = isinstance(outcome, ToolError)
        text = error_text(str(outcome), self._max_result_chars) if failed else cut(str(outcome), self._max_result_chars)
        return ToolCallRecord(
            tool_call_id=call.tool_call_id,
            name=call.name,
            arguments=dict(call.arguments),
            result=text,
            failed=failed,
            duration_s=duration_s,
        )
