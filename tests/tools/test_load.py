"""The `tools` sections of a config."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from grpo_async.config.sections import ToolSection
from grpo_async.errors import ConfigError
from grpo_async.tools import ToolError, load_tools

SAMPLES = "tests.tools.sample_tools"


def section(attribute: str, **fields: Any) -> ToolSection:
    return ToolSection(function=f"{SAMPLES}:{attribute}", **fields)


def test_every_problem_of_every_tool_is_in_one_error() -> None:
    sections = [
        section("undocumented", arguments={"c": 1}),
        section("Greeter"),
        section("multiply"),
        section("multiply"),
    ]
    with pytest.raises(ConfigError) as caught:
        load_tools(sections)
    lines = str(caught.value).splitlines()
    starts = [
        "tools.0.arguments.c: tests.tools.sample_tools:undocumented takes no `c`; it takes ['a']",
        "tools.0.function: tests.tools.sample_tools:undocumented: cannot be described to the model: ",
        "tools.1.function: tests.tools.sample_tools:Greeter: is a class; make an instance",
        "tools: the name `multiply` belongs to more than one function; rename one of them",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_a_tool_in_a_process_runs_there_and_may_raise() -> None:
    (tool,) = load_tools([section("process_of", run_in="process")])
    first, second = (asyncio.run(tool.call({"number": 1})).returned for _ in range(2))
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        asyncio.run(tool.call({"number": 0}))
    tool.close()
    assert first == second != [os.getpid()]
