"""Tool calls written as JSON, read strictly: what is refused here would break a tool, a template or the rollout store later.

Refused, each in words that the policy can act on: text that is not JSON, NaN and infinities, keys given twice, nesting deeper
than 64, unpaired surrogates, a call without a name, arguments that are not an object. Taken: `arguments` or `parameters`,
arguments as JSON text, none at all (a tool without parameters), and the OpenAI form {"function": {...}}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from grpo_async.chat.turn import UnreadableError
from grpo_async.records import ToolCall
from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.text import json_kind

MAX_DEPTH = 64
_SHOWN = 24  # characters shown on either side of an error


def scan_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start` (whitespace may come first), and the position after it: ' {"a": 1} x' -> 9.

    Raises:
        UnreadableError: there is none.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise UnreadableError(_TOO_DEEP) from error
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - _SHOWN) : error.pos + _SHOWN]
        what = f"{error.msg} near {near!r}" if near else "there is nothing where JSON should be"
        raise UnreadableError(f"it is not valid JSON: {what}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise UnreadableError(f"it is not valid JSON: {error}") from error
    _check(value)
    return value, end


def read_json(text: str) -> Any:
    """The one JSON value that `text` is; UnreadableError where it is anything else."""
    value, end = scan_json(text, 0)
    if text[end:].strip():
        raise UnreadableError(f"there is more text after the JSON: {text[end:].strip()[:_SHOWN]!r}")
    return value


def calls_of(value: Any) -> list[ToolCall]:
    """The calls that a JSON value stands for: an object is one, a list holds several. Never raises."""
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
        problem = "is missing" if name is None else f"must be the name of a tool, not {json.dumps(name)[:_SHOWN]}"
        return ToolCall(error=f"`name` {problem}", tool_call_id=call_id)
    key = "arguments" if "arguments" in item or "parameters" not in item else "parameters"
    return named_call(name.strip(), item.get(key), call_id=call_id)


def named_call(name: str, arguments: Any, *, call_id: str = "") -> ToolCall:
    """A call whose name is known. Arguments given as JSON text are read once more; none at all are {}."""
    if not name:
        return ToolCall(error="`name` is missing", tool_call_id=call_id)
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = read_json(arguments)
        except UnreadableError as error:
            return ToolCall(name=name, error=f"the arguments cannot be read: {error}", tool_call_id=call_id)
    if arguments is None or arguments == "" or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ToolCall(
            name=name, error=f"the arguments must be a JSON object, not {json_kind(arguments)}", tool_call_id=call_id
        )
    return ToolCall(name=name, arguments=dict(arguments), tool_call_id=call_id)


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def _refuse_constant(name: str) -> NoReturn:
    raise UnreadableError(f"it is not valid JSON: {name} is not a number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise UnreadableError(f"the key {twice!r} is given twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)


def _check(value: Any) -> None:
    """Without recursion: the depth is what is being checked."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, dict | list) and depth > MAX_DEPTH:
            raise UnreadableError(_TOO_DEEP)
        if isinstance(item, dict):
            pending += [(key, depth) for key in item]
            pending += [(entry, depth + 1) for entry in item.values()]
        elif isinstance(item, list):
            pending += [(entry, depth + 1) for entry in item]
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise UnreadableError("it holds a number that is too large")
        elif isinstance(item, str) and SURROGATE.search(item):
            raise UnreadableError("it holds an unpaired surrogate (\\ud800 to \\udfff)")
