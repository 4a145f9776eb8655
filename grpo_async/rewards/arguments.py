"""Arguments of a reward function that can be checked before anything starts.

    @checked_by(_check)
    def regex_match(completions, *, pattern, **_): ...

`load_rewards` calls `_check` with the section's `arguments`. Without it a wrong pattern would fail every group of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

CHECK = "check_arguments"
ArgumentCheck = Callable[[Mapping[str, Any]], None]
"""Raises ValueError("NAME: what is wrong"). An argument without a default may be missing; that is reported elsewhere."""

Function = TypeVar("Function", bound=Callable[..., Any])


def whole_number(arguments: Mapping[str, Any], name: str, default: int, *, least: int = 1) -> int:
    """The argument `name`; ValueError if it is no whole number >= `least`."""
    value = arguments.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: {value!r} must be a whole number of at least {least}")
    return value


def checked_by(check: ArgumentCheck) -> Callable[[Function], Function]:
    """Mark a reward function with the check of its arguments."""

    def mark(function: Function) -> Function:
        setattr(function, CHECK, check)
        return function

    return mark
