"""A figure over a whole run in bounded room: neighbours are merged when there are too many. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

_MOST_POINTS = 512


@dataclass(slots=True)
class Point:
    """`num_steps` steps, the first of which is `step`: the mean of their values and of their spreads (0 where there is none)."""

    step: int
    value: float
    spread: float = 0.0
    num_steps: int = 1

    def take(self, value: float, spread: float, num_steps: int = 1) -> None:
        """Merge: 2 steps of mean 1.0 and 1 of 4.0 -> 3 of mean 2.0."""
        total = self.num_steps + num_steps
        self.value += (value - self.value) * num_steps / total
        self.spread += (spread - self.spread) * num_steps / total
        self.num_steps = total


@dataclass(slots=True)
class Curve:
    """Values by step, in the order in which they come. At most `most` points are kept, each of as many steps."""

    most: int = _MOST_POINTS
    points: list[Point] = field(default_factory=list)
    steps_per_point: int = 1

    def add(self, step: int, value: float, spread: float = 0.0) -> None:
        """Values that are not finite are left out; a spread that is not finite counts as 0."""
        if not math.isfinite(value):
            return
        spread = spread if math.isfinite(spread) else 0.0
        if self.points and self.points[-1].num_steps < self.steps_per_point:
            self.points[-1].take(value, spread)
            return
        self.points.append(Point(step, value, spread))
        if len(self.points) > self.most:
            self._merge_pairs()

    def columns(self, num: int) -> list[tuple[float, float]]:
        """(value, spread) at `num` places from the first point to the last: means where several points fall on one, straight
        lines between two points where they are further apart. [0, 1] over 3 columns -> 0, 0.5, 1; [0, 1, 2, 3] over 2 -> 0.5, 2.5.
        """
        count = len(self.points)
        if not count or num < 1:
            return []
        if count >= num:
            cuts = [round(index * count / num) for index in range(num + 1)]
            return [_mean(self.points[start:end]) for start, end in pairwise(cuts)]
        if count == 1 or num == 1:
            return [_mean(self.points)] * num
        places = (index * (count - 1) / (num - 1) for index in range(num))
        return [self._between(place) for place in places]

    def _between(self, place: float) -> tuple[float, float]:
        left = min(int(place), len(self.points) - 2)
        part = place - left
        a, b = self.points[left], self.points[left + 1]
        return a.value + (b.value - a.value) * part, a.spread + (b.spread - a.spread) * part

    def _merge_pairs(self) -> None:
        merged = self.points[::2]
        for point, other in zip(merged, self.points[1::2], strict=False):
            point.take(other.value, other.spread, other.num_steps)
        self.points = merged
        self.steps_per_point *= 2


def _mean(points: Iterable[Point]) -> tuple[float, float]:
    known = list(points)
    return sum(point.value for point in known) / len(known), sum(point.spread for point in known) / len(known)
