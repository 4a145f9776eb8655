"""From metrics to the points of a plot: few enough to open fast, without losing peaks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async.findings import Row
from grpo_async.tracking.catalog import Reduction, describe

MOST_POINTS = 500
"""Of a curve. A longer one is cut into so many pieces, and each becomes one point by the metric's reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one metric, ascending by step. `low` and `high` are the extremes that each point stands for; they are empty where
    a point is one value. All lists have the same length."""

    steps: Sequence[float]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def curve(rows: Sequence[Row], name: str, *, most_points: int = MOST_POINTS) -> Curve | None:
    """The curve of a metric over all steps of the run; None where no step has it. A step that lacks it is None (a gap).

    Worked example: steps 1..6 with the values 1, 3, 2, 2, 5, 7, most_points 3, a mean: steps 2, 4, 6; values 2, 2, 6; low 1, 2, 5;
    high 3, 2, 7.
    """
    if not any(name in row for row in rows):
        return None
    size = math.ceil(len(rows) / most_points)
    if size <= 1:
        return Curve(steps=[row["step"] for row in rows], values=[_rounded(row.get(name)) for row in rows])
    reduction = describe(name).reduction
    if reduction is Reduction.SUM:  # of a step: the mean of the piece, so that the axis stays that of a step
        reduction = Reduction.MEAN
    steps: list[float] = []
    values: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for start in range(0, len(rows), size):
        piece = rows[start : start + size]
        known = [row[name] for row in piece if name in row]
        steps.append(piece[-1]["step"])
        values.append(_rounded(reduction(known)) if known else None)
        low.append(_rounded(min(known)) if known else None)
        high.append(_rounded(max(known)) if known else None)
    return Curve(steps=steps, values=values, low=low, high=high)


def spread(middle: Curve, width: Curve) -> tuple[list[float | None], list[float | None]]:
    """middle - width and middle + width: [1.0, None], [0.5, 0.5] -> [0.5, None], [1.5, None]."""
    pairs = list(zip(middle.values, width.values, strict=True))
    low = [None if m is None or w is None else _rounded(m - w) for m, w in pairs]
    high = [None if m is None or w is None else _rounded(m + w) for m, w in pairs]
    return low, high


def _rounded(value: float | None) -> float | None:
    """Five significant digits: more cannot be seen."""
    return None if value is None else float(f"{value:.5g}")
