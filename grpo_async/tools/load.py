"""Turns the `tools` sections of a config into tools; all problems in one ConfigError, with their paths."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from grpo_async.config.interaction_sections import ToolSection
from grpo_async.errors import ConfigError
from grpo_async.tools.schema import BadFunctionError
from grpo_async.tools.tool import Tool
from grpo_async.user_code.references import resolve_function


def load_tools(sections: Sequence[ToolSection]) -> list[Tool]:
    """Import and check every tool. Starts no thread.

    Raises:
        ConfigError: some cannot be found, imported, called as configured or described to a model; one line for each problem.
    """
    tools: list[Tool] = []
    problems: list[str] = []
    for index, section in enumerate(sections):
        try:
            tools.append(_load(section, f"tools.{index}"))
        except ConfigError as error:
            problems.append(str(error))
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems.extend(f"tools: the name `{name}` belongs to more than one function; rename one of them" for name in twice)
    if problems:
        raise ConfigError("\n".join(problems))
    return tools


def _load(section: ToolSection, path: str) -> Tool:
    where = f"{path}.function: {section.function}"
    function = resolve_function(section.function, where)
    problems = []
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError as error:
        raise ConfigError(f"{where}: has no signature that can be read; wrap it in a `def`") from error
    for argument in section.arguments:
        if argument not in names:
            takes = f"it takes {names}" if names else "it takes no arguments"
            problems.append(f"{path}.arguments.{argument}: {section.function} takes no `{argument}`; {takes}")
    try:
        tool = Tool.from_function(function, arguments=section.arguments, timeout_s=section.timeout_s)
    except BadFunctionError as error:
        problems.extend(f"{where}: {problem}" for problem in error.problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return tool
