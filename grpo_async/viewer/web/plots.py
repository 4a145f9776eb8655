"""The data of the plots, as charts.js takes it. Pure. layout.json lists the plots.

With one run each metric of a plot has its color; with several runs each run has its color, and metrics differ by dashes. A long
run is cut into few enough points to open fast, without losing peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grpo_async.findings import MetricRow, RunHistory
from grpo_async.tracking.catalog import REDUCTIONS, describe
from grpo_async.utils.safe_text import visible

MAX_POINTS = 500
"""Maximum number of points of a curve. A longer one is cut into that many pieces, and each becomes one point by the metric's
reduction."""

MAX_SERIES = 8
"""Colors that can be told apart."""


# -- which plots there are


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a plot. `between`: two metrics that bound its band. `single_run`: shown where there is one run only, so that
    several stay readable."""

    metric: str
    label: str
    between: tuple[str, str] | None = None
    single_run: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot. `pattern`: a prefix and a suffix; every metric that has both is a line, too. `include`: values that the axis
    always shows."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...] = ()
    pattern: tuple[str, str] | None = None
    format: str = "number"
    include: tuple[float, ...] = (0.0,)
    log: bool = False
    leave_out: tuple[str, ...] = ()
    least_found: int = 1  # with fewer metrics of the pattern the plot would only repeat another
    of_evaluations: bool = False  # points of the evaluations instead of the steps
    single_run: bool = False  # as for a line


_LAYOUT = Path(__file__).with_name("layout.json")
CHAPTERS = TypeAdapter(dict[str, tuple[Plot, ...]]).validate_json(_LAYOUT.read_text(encoding="utf-8"))
"""Plots by the title of their chapter."""


# -- curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one metric, ascending by step. `low` and `high` are the extremes that each point stands for; they are empty where
    a point is one value. All lists have the same length."""

    steps: Sequence[float]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def curve(rows: Sequence[MetricRow], name: str, *, max_points: int = MAX_POINTS) -> Curve | None:
    """The curve of a metric over all steps of the run; None where no step has it. A step that lacks it is None (a gap).

    Worked example: steps 1..6 with the values 1, 3, 2, 2, 5, 7, max_points 3, a mean: steps 2, 4, 6; values 2, 2, 6; low 1, 2, 5;
    high 3, 2, 7.
    """
    if not any(name in row for row in rows):
        return None
    size = math.ceil(len(rows) / max_points)
    if size <= 1:
        return Curve(steps=[row["step"] for row in rows], values=[_rounded(row.get(name)) for row in rows])
    how = describe(name).reduction
    reduction = REDUCTIONS["mean" if how == "sum" else how]  # of a sum the mean, so that the axis stays that of a step
    pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
    known = [[row[name] for row in piece if name in row] for piece in pieces]
    return Curve(
        steps=[piece[-1]["step"] for piece in pieces],
        values=[_rounded(reduction(values)) if values else None for values in known],
        low=[_rounded(min(values, default=None)) for values in known],
        high=[_rounded(max(values, default=None)) for values in known],
    )


def _rounded(value: float | None) -> float | None:
    """Five significant digits: more cannot be seen."""
    return None if value is None else float(f"{value:.5g}")


def _band(line: Line, middle: Curve, rows: Sequence[MetricRow]) -> list[Sequence[float | None]] | None:
    """The lower and the upper bound of a line's band; None: it has none."""
    bounds = [found for bound in line.between or () if (found := curve(rows, bound)) is not None]
    if len(bounds) == 2:
        return [bound.values for bound in bounds]
    return [middle.low, middle.high] if middle.low and not line.single_run else None


# -- plots of metrics


def draw(plot: Plot, runs: Mapping[str, RunHistory]) -> dict[str, Any] | None:
    """The plot of these runs, by their labels: `metrics` that it shows, with what they are, and `options` for charts.js; None
    where no run has its metrics."""
    if plot.single_run and len(runs) > 1:
        return None
    series: list[dict[str, Any]] = []
    metrics: list[str] = []
    left_out: set[str] = set()
    for run_index, (label, run) in enumerate(runs.items()):
        rows = _rows_of(plot, run)
        lines = [line for line in _lines_of(plot, rows) if len(runs) == 1 or not line.single_run]
        if plot.of_evaluations:  # there may be many values of `evaluation.group_by`
            left_out.update(line.metric for line in lines[MAX_SERIES:])
            del lines[MAX_SERIES:]
        for number, line in enumerate(lines):
            drawn_line = _series(line, rows)
            if drawn_line is None:
                continue
            if len(runs) > 1:
                drawn_line.pop("band", None)  # of several runs they would hide each other
                drawn_line["label"] = label if len(lines) == 1 else f"{label}: {line.label}"
            drawn_line["color"] = (run_index if len(runs) > 1 else number) % MAX_SERIES + 1
            drawn_line["dash"] = number % 4 if len(runs) > 1 else (2 if line.single_run else number // MAX_SERIES)
            if plot.of_evaluations:
                drawn_line["points"] = True
            series.append(drawn_line)
            metrics.append(line.metric)
    if not series:
        return None
    options = {
        "title": visible(plot.title),
        "unit": (plot.unit.partition(", band")[0] if len(runs) > 1 else plot.unit)
        + (f"; {len(left_out)} more are not drawn" if left_out else ""),
        "format": plot.format,
        "include": list(plot.include),
        "log": plot.log,
        **_shared_x(series),
    }
    known = {name: describe(name).help for name in metrics if describe(name).is_known}
    return {"name": plot.name, "metrics": known, "options": options}


def draw_all(plots: Iterable[Plot], runs: Mapping[str, RunHistory]) -> list[dict[str, Any]]:
    """Draw the plots that have metrics."""
    return [drawing for plot in plots if (drawing := draw(plot, runs)) is not None]


def _rows_of(plot: Plot, run: RunHistory) -> Sequence[MetricRow]:
    """Rows of the steps or of the evaluations, ascending by step. Evaluations have their metrics as `eval/NAME`, as
    `eval/reward/VALUE` the reward of a value of `evaluation.group_by`, and the reward minus and plus its standard error."""
    if not plot.of_evaluations:
        return run.metrics
    return [
        {
            "step": float(each.step),
            **{f"eval/{name}": value for name, value in each.metrics.items()},
            **_bounds(each.metrics),
            **{f"eval/reward/{group}": found["reward"] for group, found in each.by_group.items() if "reward" in found},
        }
        for each in run.evaluations
        if each.metrics
    ]


def _bounds(metrics: Mapping[str, float]) -> dict[str, float]:
    if not {"reward", "reward_stderr"} <= metrics.keys():
        return {}
    signs = {"low": -1.0, "high": 1.0}
    return {f"eval/reward_{name}": metrics["reward"] + sign * metrics["reward_stderr"] for name, sign in signs.items()}


def _lines_of(plot: Plot, rows: Sequence[MetricRow]) -> list[Line]:
    """The lines of a plot for one run: its own, then those that its pattern finds in the rows, sorted by name."""
    if plot.pattern is None:
        return list(plot.lines)
    prefix, suffix = plot.pattern
    names = {name for row in rows for name in row if name.startswith(prefix) and name.endswith(suffix)}
    found = [
        Line(name, name[prefix.rfind("/") + 1 :].removesuffix(suffix).replace("_", " "))
        for name in sorted(names - set(plot.leave_out))
    ]
    if len(found) < plot.least_found:
        return list(plot.lines)
    return [*plot.lines, *found]


def _series(line: Line, rows: Sequence[MetricRow]) -> dict[str, Any] | None:
    middle = curve(rows, line.metric)
    if middle is None:
        return None
    band = _band(line, middle, rows)
    return {
        "label": visible(line.label),
        "x": middle.steps,
        "values": middle.values,
        **({} if band is None else {"band": band}),
    }


def _shared_x(series: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps once, where all series have the same."""
    first = list(series[0]["x"])
    if any(list(each["x"]) != first for each in series):
        return {"series": series}
    for each in series:
        del each["x"]
    return {"x": first, "series": series}
