"""JSON read strictly: what is refused here would break a tool, a template or the rollout store later.

Refused, each in words that the policy can act on: text that is not JSON, NaN and infinities, keys given twice, nesting deeper
than 64, lone surrogates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.text import duplicates, json_kind

MAX_DEPTH = 64
_SHOWN = 24  # characters shown on either side of an error


class UnreadableError(Exception):
    """The text is not the JSON that is wanted; the message is for the policy to read."""


def scan_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start` (whitespace may come first), and the position after it: ' {"a": 1} x' -> 9."""
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


def arguments_of(given: Any) -> Mapping[str, Any]:
    """Arguments of a tool call, given as an object, as the JSON text of one, or not at all (None or blank text: {})."""
    if isinstance(given, str):
        given = read_json(given) if given.strip() else None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UnreadableError(f"they must be a JSON object, not {json_kind(given)}")
    return given


def arguments_text(call: Mapping[str, Any]) -> str:
    """Arguments of a call in the OpenAI form, as the JSON text that APIs take them as."""
    given = call["function"].get("arguments")
    return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def _refuse_constant(name: str) -> NoReturn:
    raise UnreadableError(f"it is not valid JSON: {name} is not a number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableError(f"the key {duplicates(name for name, _ in pairs)[0]!r} is given twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)


def _check(value: Any) -> None:
    """Raise UnreadableError for what JSON allows and this module refuses; without recursion, since the depth is checked."""
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
            raise UnreadableError("it holds a lone surrogate (\\ud800 to \\udfff)")
