"""Tool calls written as JSON.

Refused, in words that the policy can act on: a call without a name, arguments that are not an object, and what `utils.strict_json`
refuses. Accepted: `arguments` or `parameters`, arguments as JSON text, none at all (a tool without parameters), and the OpenAI form
{"function": {...}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo_async.records import ToolCall
from grpo_async.utils.strict_json import UnreadableError, arguments_of
from grpo_async.utils.text import clipped, json_kind


def calls_of(value: Any) -> list[ToolCall]:
    """The calls in a JSON value: an object is one, a list holds several. Never raises."""
    items = value if isinstance(value, list) else [value]
    return [call_of(item) for item in items]


def call_of(item: Any) -> ToolCall:
    """One call. {"name": "add", "arguments": {"a": 1}} -> add(a=1)."""
    if not isinstance(item, Mapping):
        return ToolCall(error=f"a call is a JSON object with `name` and `arguments`, not {json_kind(item)}")
    function = item.get("function")
    written_id = item.get("id")
    if isinstance(function, Mapping):
        item = function
    call_id = written_id if isinstance(written_id, str) else ""
    name = item.get("name")
    if not isinstance(name, str) or not name.strip():
        problem = "is missing" if name is None else f"must be the name of a tool, not {clipped(json.dumps(name))}"
        return ToolCall(error=f"`name` {problem}", tool_call_id=call_id)
    key = "arguments" if "arguments" in item or "parameters" not in item else "parameters"
    return named_call(name.strip(), item.get(key), call_id=call_id)


def named_call(name: str, arguments: Any, *, call_id: str = "") -> ToolCall:
    """A call whose name is known."""
    if not name:
        return ToolCall(error="`name` is missing", tool_call_id=call_id)
    try:
        arguments = arguments_of(arguments)
    except UnreadableError as error:
        return ToolCall(name=name, error=f"the arguments cannot be read: {error}", tool_call_id=call_id)
    return ToolCall(name=name, arguments=dict(arguments), tool_call_id=call_id)
