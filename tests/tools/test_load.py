"""The `tools` sections of a config."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_async.config.sections import ToolSection
from grpo_async.errors import ConfigError
from grpo_async.tools import ToolError, load_tools

SAMPLES = "tests.tools.sample_tools"


def section(attribute: str, **fields: Any) -> ToolSection:
    return ToolSection(function=f"{SAMPLES}:{attribute}", **fields)


def test_every_problem_of_every_tool_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools(
            [
                section("multiply"),
                section("undocumented", arguments={"c": 1}),
                section("half_documented"),
                section("Greeter"),
                section("number"),
                section("multipy"),
                section("other_multiply"),
            ]
        )
    lines = str(caught.value).splitlines()
    starts = [
        "tools.1.arguments.c: tests.tools.sample_tools:undocumented takes no `c`; it takes ['a']",
        "tools.1.function: tests.tools.sample_tools:undocumented: cannot be described to the model: ",
        "tools.2.function: tests.tools.sample_tools:half_documented: cannot be described to the model: ",
        "tools.3.function: tests.tools.sample_tools:Greeter: is a class; make an instance",
        "tools.4.function: tests.tools.sample_tools:number: is of type int, which cannot be called",
        "tools.5.function: tests.tools.sample_tools:multipy: `tests.tools.sample_tools` has no `multipy`",
        "tools: the name `multiply` belongs to more than one function; rename one of them",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_a_tool_in_a_process_may_use_signals_and_is_killed_when_it_hangs() -> None:
    async def run() -> list[str]:
        found = []
        for number in (3, 0, -1, 4):
            try:
                found.append((await tool.call({"number": number})).text)
            except ToolError as error:
                found.append(str(error))
        return found

    (tool,) = load_tools([section("alarmed", run_in="process", timeout_s=2.0)])
    six, divided, late, eight = asyncio.run(run())
    tool.close()
    assert (six, eight) == ("[6]", "[8]")
    assert divided.startswith("ZeroDivisionError")
    assert "took longer than 2 s" in late
