"""Variants measured in turns, so that a drift of the machine hits all of them, and their ratios within a turn."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence


def in_turns(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, variant): every variant once a round; the order turns around from round to round (a b, b a, a b, ...)."""
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            yield number, variant


def ratios(values: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """over / under, round by round. Raises: ValueError where a round has one of the two only."""
    return [a / b for a, b in zip(values[over], values[under], strict=True)]


def median_interval(values: Sequence[float], *, seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """The interval that holds 95% of the medians of resampled values (the bootstrap's percentile interval, Efron 1979)."""
    if len(values) < 2:
        return values[0], values[0]
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]
