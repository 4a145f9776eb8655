"""Checks the arguments that a model wrote against a tool's type hints, before the tool is called.

pydantic does it, strictly: "3" is not an integer, and an error teaches the model to write 3. The one conversion is 3.0 -> 3 where
an integer is wanted, for JSON has only one kind of number and JSON schema calls 3.0 an integer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NotRequired, Required

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from grpo_async.tools.results import ToolError
from grpo_async.utils.text import clipped, did_you_mean

Arguments = TypeAdapter[dict[str, Any]]


def arguments_of(name: str, hints: Mapping[str, Any], required: Collection[str]) -> Arguments:
    """What reads the arguments of the tool `name`: type hint by argument, and which have no default."""
    make: Any = TypedDict  # its fields are not known to type checkers
    kind = make(name, {key: Required[hint] if key in required else NotRequired[hint] for key, hint in hints.items()})
    kind.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    return TypeAdapter(kind)


def check_arguments(reader: Arguments, parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call; `parameters` is that part of the tool's schema.

    Raises:
        ToolError: everything that is wrong with them, and what the tool takes.
    """
    try:
        return reader.validate_json(json.dumps(_with_integers(arguments)))
    except ValidationError as error:
        problems = [_problem(each, parameters) for each in error.errors(include_url=False)]
    raise ToolError(f"{'; '.join(problems[:8])}. {_signature(parameters)}")


def _with_integers(value: Any) -> Any:
    """{"a": [3.0, 3.5]} -> {"a": [3, 3.5]}; a float's hint turns 3 into 3.0 again."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(item) for key, item in value.items()}
    return [_with_integers(item) for item in value] if isinstance(value, (list, tuple)) else value


def _problem(error: Any, parameters: Mapping[str, Any]) -> str:
    """One of pydantic's errors in words: `argument "flags" at 1: input should be a valid boolean, not 1`."""
    key, *inside = error["loc"] or ("",)
    if error["type"] == "missing" and not inside:
        return f'missing argument "{key}"'
    if error["type"] == "extra_forbidden" and not inside:
        return f'unknown argument "{clipped(key)}"{did_you_mean(key, parameters.get("properties", {}))}'
    place = f" at {'.'.join(map(str, inside))}" if inside else ""
    given = clipped(json.dumps(error["input"], ensure_ascii=False, default=str))
    return f'argument "{key}"{place}: {error["msg"][0].lower()}{error["msg"][1:]}, not {given}'


def _signature(parameters: Mapping[str, Any]) -> str:
    """`it takes number: integer, unit?: string`; an argument that may be left out has a `?`."""
    required = set(parameters.get("required", ()))
    parts = []
    for key, schema in parameters.get("properties", {}).items():
        types = schema.get("type", "any")
        kind = types if isinstance(types, str) else " or ".join(types)
        parts.append(f"{key}{'' if key in required else '?'}: {kind}")
    return f"It takes {', '.join(parts) or 'no arguments'}"
