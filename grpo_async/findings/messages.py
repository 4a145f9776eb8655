"""Error messages that the diagnosis recognizes in status.json: each is written and read here."""

from __future__ import annotations

import re

_EQUAL = re.compile(r"all rewards are (-?\d+(?:\.\d+)?(?:e[-+]\d+)?): ([^\n]+)")
_REWARD = re.compile(r"reward `[^`]+`: [^\n]+")


def equal_rewards(value: float, why: str) -> str:
    """Say that no group of a run has better and worse answers. It must end its line."""
    return f"all rewards are {value:g}: {why}"


def read_equal_rewards(error: str) -> tuple[float, str] | None:
    """Return the value and the reason of `equal_rewards`; None: the error is another."""
    found = _EQUAL.search(error)
    return None if found is None else (float(found[1]), found[2])


def reward_failure(name: str, problem: str) -> str:
    """Say that a reward function failed a call."""
    return f"reward `{name}`: {problem}"


def first_reward_failure(error: str) -> str | None:
    """Return the line of `reward_failure`; None: there is none."""
    found = _REWARD.search(error)
    return None if found is None else found[0].rstrip(".")
