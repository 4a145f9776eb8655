"""Checks the arguments that a model wrote against a tool's JSON schema, before the tool is called.

Nothing is guessed: "3" is no integer, and an error teaches the model to write 3. The one conversion is 3.0 -> 3 where an
integer is wanted, for JSON has only one kind of number and JSON schema calls 3.0 an integer.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from grpo_async.tools.results import ToolError

_TYPE_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class _Misfit(Exception):
    """A value that its schema does not allow; the text continues "argument x"."""


def check_arguments(name: str, parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the tool `name`; `parameters` is that part of its schema.

    Raises:
        ToolError: everything that is wrong with them, and what the tool takes.
    """
    properties: Mapping[str, Any] = parameters.get("properties", {})
    problems = [f'missing argument "{wanted}"' for wanted in parameters.get("required", ()) if wanted not in arguments]
    checked = {}
    for key, value in arguments.items():
        if key not in properties:
            problems.append(f'unknown argument "{_clipped(key)}"{_did_you_mean(key, properties)}')
            continue
        try:
            checked[key] = _fit(value, properties[key])
        except _Misfit as misfit:
            problems.append(f'argument "{key}" {misfit}')
    if problems:
        raise ToolError(f"{'; '.join(problems[:8])}. {_signature(name, parameters)}")
    return checked


def _fit(value: Any, schema: Mapping[str, Any]) -> Any:
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        return _fit_any(value, schema["anyOf"])
    types = schema.get("type")
    if types is not None:
        value = _fit_type(value, [types] if isinstance(types, str) else list(types), schema)
    if "enum" in schema and not any(value == allowed and type(value) is type(allowed) for allowed in schema["enum"]):
        choices = ", ".join(_shown(allowed) for allowed in schema["enum"])
        raise _Misfit(f"must be one of {choices}, not {_shown(value)}")
    return value


def _fit_any(value: Any, schemas: list[Mapping[str, Any]]) -> Any:
    problems = []
    for schema in schemas:
        try:
            return _fit(value, schema)
        except _Misfit as misfit:
            problems.append(str(misfit))
    raise _Misfit(", or ".join(problems))


def _fit_type(value: Any, types: list[str], schema: Mapping[str, Any]) -> Any:
    kind = _json_type(value)
    if kind not in types and not (kind == "integer" and "number" in types):
        if kind == "number" and "integer" in types and value.is_integer():
            return int(value)
        wanted = " or ".join(_TYPE_WORDS.get(name, name) for name in types)
        raise _Misfit(f"must be {wanted}, not {_shown(value)}")
    if kind == "array":
        return _fit_items(value, schema)
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return {key: _fit_inside(item, schema["additionalProperties"], f'"{key}"') for key, item in value.items()}
    return value


def _fit_items(value: list[Any], schema: Mapping[str, Any]) -> list[Any]:
    if "prefixItems" in schema:
        schemas = schema["prefixItems"]
        if len(schemas) != len(value):
            raise _Misfit(f"must have {len(schemas)} items, not {len(value)}")
        return [_fit_inside(item, schemas[index], str(index)) for index, item in enumerate(value)]
    if "items" in schema:
        return [_fit_inside(item, schema["items"], str(index)) for index, item in enumerate(value)]
    return value


def _fit_inside(value: Any, schema: Mapping[str, Any], place: str) -> Any:
    try:
        return _fit(value, schema)
    except _Misfit as misfit:
        raise _Misfit(f"at {place} {misfit}") from None


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("integer", int), ("number", float), ("string", str)):
        if isinstance(value, types):
            return kind
    return "array" if isinstance(value, (list, tuple)) else "object"


def _signature(name: str, parameters: Mapping[str, Any]) -> str:
    """`guess takes number: integer`; an argument that may be left out has a `?`."""
    required = set(parameters.get("required", ()))
    parts = []
    for key, schema in parameters.get("properties", {}).items():
        types = schema.get("type", "any")
        words = types if isinstance(types, str) else " or ".join(types)
        parts.append(f"{key}{'' if key in required else '?'}: {words}")
    return f"{name} takes {', '.join(parts) or 'no arguments'}"


def _did_you_mean(key: str, properties: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(key, list(properties), n=1)
    return f', did you mean "{nearest[0]}"?' if nearest else ""


def _shown(value: Any) -> str:
    return _clipped(json.dumps(value, ensure_ascii=False, default=str))


def _clipped(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
