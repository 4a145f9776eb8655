"""Advantage functions as a user might write them, right and wrong."""

from __future__ import annotations

import math


def above(rewards: list[float | None], *, baseline: float = 0.5) -> list[float]:
    """Against a fixed baseline; also says something of unscored rewards, which is not used."""
    return [7.0 if reward is None else reward - baseline for reward in rewards]


def takes_nothing() -> list[float]:
    return []


async def is_async(rewards: list[float | None]) -> list[float]:
    return [0.0 for _ in rewards]


def too_few(rewards: list[float | None]) -> list[float]:
    return [0.0 for _ in rewards][1:]


def not_finite(rewards: list[float | None]) -> list[float]:
    return [math.nan for _ in rewards]


def words(rewards: list[float | None]) -> list[str]:
    return ["1" for _ in rewards]


def none_at_all(rewards: list[float | None]) -> None:
    return None


def raises(rewards: list[float | None]) -> list[float]:
    raise ZeroDivisionError(f"no baseline for {len(rewards)} rewards")


not_callable = 3


class Scaled:
    pass
