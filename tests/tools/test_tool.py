"""Calling one tool: threads, time limits, failures; and its result as the model gets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from grpo_async.tools import Tool, ToolError
from grpo_async.tools.results import ToolResult
from tests.tools import sample_tools


def called(function: Callable[..., Any], timeout_s: float = 5.0, **arguments: Any) -> str:
    return asyncio.run(Tool.from_function(function, timeout_s=timeout_s).call(arguments)).text


def raising(error: BaseException, *, is_async: bool) -> Callable[..., Any]:
    def plain() -> str:
        """Raises."""
        raise error

    async def later() -> str:
        """Raises."""
        raise error

    return later if is_async else plain


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (sample_tools.multiply, {"a": 6, "b": 7}, "42"),
        (sample_tools.async_add, {"a": 6, "b": 7}, "13"),
        (sample_tools.search_books, {"query": "cats"}, "cats in books, 3, asc"),
        (sample_tools.greeter, {"name": "Ann"}, "Hello Ann"),
        (sample_tools.async_greeter, {"name": "Ann"}, "Later, Ann"),
    ],
)
def test_functions_partials_methods_and_objects_sync_and_async_are_called(
    function: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    assert called(function, **arguments) == text


def test_fixed_arguments_reach_the_function_and_the_model_cannot_set_them() -> None:
    tool = Tool.from_function(sample_tools.search, arguments={"index": "books", "limit": 1})
    assert asyncio.run(tool.call({"query": "cats"})).text == "cats in books, 1, asc"
    with pytest.raises(ToolError, match='unknown argument "limit"'):
        asyncio.run(tool.call({"query": "cats", "limit": 9}))


def test_a_tool_runs_in_another_thread_and_an_async_one_always_on_the_same_loop() -> None:
    loops = []

    def plain() -> bool:
        """Where it runs."""
        return threading.current_thread() is threading.main_thread()

    async def later() -> bool:
        """Where it runs."""
        loops.append(asyncio.get_running_loop())  # what a client that stays open belongs to
        return plain()

    tool = Tool.from_function(later)
    assert [called(plain), *(asyncio.run(tool.call({})).text for _ in range(2))] == ["False"] * 3
    assert loops[0] is loops[1]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no\n such thing"), "ValueError: no such thing"),
        (asyncio.CancelledError("mine"), "CancelledError: mine"),
        (ToolError("use the other one"), "use the other one"),
    ],
)
def test_whatever_a_tool_raises_is_a_tool_error_in_one_line(error: BaseException, told: str, is_async: bool) -> None:
    with pytest.raises(ToolError) as caught:
        called(raising(error, is_async=is_async))
    assert str(caught.value) == told
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "None"),
        ({"a": "é", "b": [1, None]}, "{'a': 'é', 'b': [1, None]}"),
        ([("a", 1)], "[('a', 1)]"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "fruit", "name": "fig"}], "[{'type': 'fruit', 'name': 'fig'}]"),
        ("half a \ud83d pair", "half a � pair"),
    ],
)
def test_values_are_texts_as_in_trl_and_lists_reach_rewards_as_they_are(value: Any, text: str) -> None:
    result = ToolResult.of(value)
    assert result.text == text
    assert result.returned == (value if isinstance(value, list) else None)
    assert result.returned is None or result.returned is not value
