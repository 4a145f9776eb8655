"""run_python as a model and a config see it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_async.config.sections import ToolSection
from grpo_async.tools.tool import Tool, load_tools


def _tool(**arguments: Any) -> Tool:
    (tool,) = load_tools([ToolSection(function="grpo_async.tools.python:run_python", arguments=arguments)])
    return tool


def _answer(code: str, **arguments: Any) -> str:
    return asyncio.run(_tool(**arguments).call({"code": code})).text


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "The program printed nothing."),
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero"),
        ("def", "SyntaxError: invalid syntax"),
        ("x = bytearray(1 << 30)", "Stopped: the program used more than 512 MiB of memory."),
        ("open('/etc/passwd')", "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"),
    ],
)
def test_the_answer_is_the_output_or_what_went_wrong(code: str, answer: str) -> None:
    assert _answer(code) == answer


def test_limits_come_from_the_config_and_are_in_the_answer() -> None:
    assert _answer("while True: pass", wall_s=1) == "Stopped: the program ran longer than 1 seconds."
    assert _answer("print('x' * 100)", max_output_chars=10) == (
        "xxxxxxxxxx\nStopped: the program printed more than 10 characters."
    )
