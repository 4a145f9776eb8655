"""Error messages that findings recognize in status.json: each is written and read here."""

from __future__ import annotations

import re

_EQUAL = re.compile(r"all rewards are (-?\d+(?:\.\d+)?(?:e[-+]\d+)?):")
_REWARD = re.compile(r"reward `[^`]+`: [^\n]+")


def equal_rewards(value: float, why: str) -> str:
    """No group of a run has better and worse answers."""
    return f"all rewards are {value:g}: {why}"


def equal_value(error: str) -> float | None:
    """The reward of `equal_rewards`; None: the error is another."""
    found = _EQUAL.search(error)
    return None if found is None else float(found[1])


def reward_failure(name: str, problem: str) -> str:
    """A reward function failed a call."""
    return f"reward `{name}`: {problem}"


def first_reward_failure(error: str) -> str | None:
    """The line of `reward_failure`; None: there is none."""
    found = _REWARD.search(error)
    return None if found is None else found[0].rstrip(".")
