"""The calls of one turn: order, concurrency, reports of failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_async.records import ToolCall, ToolCallRecord
from grpo_async.tools import MAX_CALLS_PER_TURN, Tool, ToolExecutor
from tests.tools import sample_tools


def call(name: str, index: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(tool_call_id=f"call{index:05d}", name=name, arguments=arguments)


def execute(
    functions: Sequence[Callable[..., Any] | Tool], calls: Sequence[ToolCall], max_result_chars: int = 200
) -> list[ToolCallRecord]:
    tools = [f if isinstance(f, Tool) else Tool.from_function(f, timeout_s=5.0) for f in functions]
    return asyncio.run(ToolExecutor(tools, max_result_chars=max_result_chars).execute(calls))


def error_of(record: ToolCallRecord) -> str:
    assert record.failed
    content: Mapping[str, str] = json.loads(record.result)
    assert list(content) == ["error"]
    return content["error"]


def test_two_calls_of_which_one_fails_are_two_records_in_their_order() -> None:
    """R2.7, R2.8, R3.3: what the tool metrics count, and what the rollout store keeps of a call."""
    calls = [call("multiply", 1, a=6, b=7), call("multiply", 2, a="six", b=7)]
    good, bad = execute([sample_tools.multiply], calls)
    assert (good.tool_call_id, good.name, good.result, good.failed) == ("call00001", "multiply", "42", False)
    assert (good.arguments, bad.tool_call_id) == ({"a": 6, "b": 7}, "call00002")
    assert 'argument "a": input should be a valid integer' in error_of(bad)
    assert good.duration_s >= 0.0


def test_long_results_and_long_errors_are_cut() -> None:
    def talks(fail: bool) -> str:
        """Talks.

        Args:
            fail: Whether to fail.
        """
        if fail:
            raise ValueError("x" * 100)
        return "y" * 100

    good, bad = execute([talks], [call("talks", fail=False), call("talks", fail=True)], max_result_chars=16)
    assert good.result == "y" * 16 + " [cut: 84 more characters]"
    assert error_of(bad) == "ValueError: xxxx [cut: 96 more characters]"  # 12 + 100 characters, 16 of them kept


def test_of_too_many_calls_the_rest_is_answered_without_being_made() -> None:
    made: list[int] = []

    async def probe() -> None:
        """Notes the call."""
        made.append(1)

    records = execute([probe], [call("probe", index) for index in range(MAX_CALLS_PER_TURN + 2)])
    assert len(made) == MAX_CALLS_PER_TURN
    assert [record.failed for record in records] == [False] * MAX_CALLS_PER_TURN + [True] * 2
    assert error_of(records[-1]) == "too many calls in one turn; only the first 32 were made"
