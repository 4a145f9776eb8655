"""What a user's code may touch: the copies that each call gets, so that changing its arguments changes nothing of the
run, of another call, or of the record; and the copies that are kept of what it returned."""

from __future__ import annotations

import copy
import datetime
import decimal
import logging
from typing import Any

from grpo_async.utils.warn_once import WarnOnce

_warn = WarnOnce(logging.getLogger(__name__))
_IMMUTABLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, decimal.Decimal}
    | {datetime.date, datetime.datetime, datetime.time, datetime.timedelta}
)


def own_copy(value: Any) -> Any:
    """Return a copy that shares nothing mutable with `value`, whatever containers it holds.

    Two entries of a list that are one object become two: [row] * 2 -> [copy, copy]. A list of numbers or texts, such as
    token ids, costs one pass over it. What refuses to be copied (a lock, a connection, a tensor with a graph), which only a
    user's own code can have made, stays shared, with a warning for each type.
    """
    try:
        return _copied(value)
    except RecursionError:  # a container that holds itself
        return copy.deepcopy(value)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list or kind is tuple:
        if _IMMUTABLE.issuperset(map(type, value)):
            return value[:]
        return kind([_copied(item) for item in value])
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception as error:  # noqa: BLE001 - a class may refuse with anything
        _warn(str(kind), "calls of your code share one %s, which cannot be copied: %s", kind.__qualname__, error)
        return value
