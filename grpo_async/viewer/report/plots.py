"""The data of the plots, as charts.js takes it. Pure. Which plots of metrics there are: `chapters`.

With one run each metric of a plot has its color; with several runs each run has its color, and metrics differ by dashes. A long
run is cut into few enough points to open fast, without losing peaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.findings import Row
from grpo_async.store.summaries import Histogram
from grpo_async.tracking.catalog import Reduction, describe
from grpo_async.viewer.report.layout import Line, Plot
from grpo_async.viewer.report.run_data import RunData

MAX_POINTS = 500
"""Of a curve. A longer one is cut into that many pieces, and each becomes one point by the metric's reduction."""

_MAX_SERIES = 8  # colors that keep apart
_STALENESS = "async/staleness/"
_LABELS = {"majority_baseline": "always the most frequent answer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A plot with its data. `data` is for charts.js; `metrics` are the metrics that it shows."""

    name: str
    data: dict[str, Any]
    metrics: Sequence[str] = ()


# -- curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one metric, ascending by step. `low` and `high` are the extremes that each point stands for; they are empty where
    a point is one value. All lists have the same length."""

    steps: Sequence[float]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def curve(rows: Sequence[Row], name: str, *, max_points: int = MAX_POINTS) -> Curve | None:
    """The curve of a metric over all steps of the run; None where no step has it. A step that lacks it is None (a gap).

    Worked example: steps 1..6 with the values 1, 3, 2, 2, 5, 7, max_points 3, a mean: steps 2, 4, 6; values 2, 2, 6; low 1, 2, 5;
    high 3, 2, 7.
    """
    if not any(name in row for row in rows):
        return None
    size = math.ceil(len(rows) / max_points)
    if size <= 1:
        return Curve(steps=[row["step"] for row in rows], values=[_rounded(row.get(name)) for row in rows])
    reduction = describe(name).reduction
    if reduction is Reduction.SUM:  # of a step: the mean of the piece, so that the axis stays that of a step
        reduction = Reduction.MEAN
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


def _band(line: Line, middle: Curve, rows: Sequence[Row]) -> list[Sequence[float | None]] | None:
    """The lower and the upper bound of a line's band; None: it has none."""
    width = curve(rows, line.around) if line.around else None
    if width is not None:  # mean 0.5, width 0.7, lowest 0, highest 1 -> 0 to 1: a band ends where no value can be
        least, most = curve(rows, f"{line.metric}_min"), curve(rows, f"{line.metric}_max")
        low = [None if m is None or w is None else m - w for m, w in zip(middle.values, width.values, strict=True)]
        high = [None if m is None or w is None else m + w for m, w in zip(middle.values, width.values, strict=True)]
        return [_limited(low, least, max), _limited(high, most, min)]
    bounds = [found for bound in line.between or () if (found := curve(rows, bound)) is not None]
    if len(bounds) == 2:
        return [bound.values for bound in bounds]
    return [middle.low, middle.high] if middle.low and not line.alone else None


def _limited(
    values: Sequence[float | None], limit: Curve | None, choose: Callable[[float, float], float]
) -> list[float | None]:
    limits = values if limit is None else limit.values
    return [_rounded(a if a is None or b is None else choose(a, b)) for a, b in zip(values, limits, strict=True)]


# -- plots of metrics


def draw(plot: Plot, runs: Sequence[RunData]) -> list[Drawing]:
    """The plot of these runs; several for stacked areas of several runs, none where no run has its metrics."""
    if plot.kind == "stacked":
        drawn = [_stacked(plot, run, len(runs) > 1, place) for place, run in enumerate(runs)]
        return [drawing for drawing in drawn if drawing is not None]
    series: list[dict[str, Any]] = []
    metrics: list[str] = []
    for place, run in enumerate(runs):
        lines = [line for line in _lines_of(plot, run) if len(runs) == 1 or not line.alone]
        for number, line in enumerate(lines):
            drawn_line = _series(line, run)
            if drawn_line is None:
                continue
            if len(runs) > 1:
                drawn_line["label"] = run.label if len(lines) == 1 else f"{run.label}: {line.label}"
            drawn_line["color"] = (place if len(runs) > 1 else number) % _MAX_SERIES + 1
            drawn_line["dash"] = number % 4 if len(runs) > 1 else (2 if line.alone else number // _MAX_SERIES)
            series.append(drawn_line)
            metrics.append(line.metric)
    if not series:
        return []
    return [Drawing(name=plot.name, data=_options(plot, _shared_x(series)), metrics=list(dict.fromkeys(metrics)))]


def _lines_of(plot: Plot, run: RunData) -> list[Line]:
    """The lines of a plot for one run: its own, then those that its pattern finds in the run's metrics, sorted by name."""
    if plot.pattern is None:
        return list(plot.lines)
    prefix, suffix = plot.pattern
    found = [
        Line(name, name.removeprefix(prefix).removesuffix(suffix).replace("_", " "))
        for name in run.names(prefix, suffix)
        if name not in plot.leave_out
    ]
    if len(found) < plot.least_found:
        return list(plot.lines)
    rank = {label: place for place, label in enumerate(plot.order)}
    return [*plot.lines, *sorted(found, key=lambda line: rank.get(line.label, len(rank)))]


def _series(line: Line, run: RunData) -> dict[str, Any] | None:
    middle = curve(run.metrics, line.metric)
    if middle is None:
        return None
    band = _band(line, middle, run.metrics)
    return {
        "label": line.label,
        "x": middle.steps,
        "values": middle.values,
        **({} if band is None else {"band": band}),
    }


def _stacked(plot: Plot, run: RunData, is_one_of_several: bool, place: int) -> Drawing | None:
    lines = _lines_of(plot, run)
    series = [drawn for line in lines if (drawn := _series(line, run)) is not None]
    series = [each for each in series if any(each["values"])]  # what is 0 everywhere has no area
    if not series:
        return None
    for number, each in enumerate(series):
        each["color"] = number % _MAX_SERIES + 1
        each.pop("band", None)
    options = _options(plot, _shared_x(series))
    if is_one_of_several:
        options["title"] = f"{plot.title}: {run.label}"
    name = f"{plot.name}-{place + 1}" if is_one_of_several else plot.name
    return Drawing(name=name, data=options, metrics=[line.metric for line in lines])


def _shared_x(series: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps once, where all series have the same."""
    first = list(series[0]["x"])
    if any(list(each["x"]) != first for each in series):
        return {"series": series}
    for each in series:
        del each["x"]
    return {"x": first, "series": series}


def _options(plot: Plot, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": plot.kind,
        "title": plot.title,
        "unit": plot.unit,
        "format": plot.format,
        "include": list(plot.include),
        "log": plot.log,
        **content,
    }


# -- held-out results


def held_out_plots(runs: Sequence[RunData]) -> list[Drawing]:
    """The held-out reward with its standard error; pass@k; for a single run the reward by group; and the length."""
    passes = sorted(
        {name for run in runs for each in run.evaluations for name in each.metrics if name.startswith("pass@")},
        key=lambda name: int(name.removeprefix("pass@") or 0),
    )
    drawings = [
        _evaluations(
            "held-out", "Held-out reward", "mean over the prompts, band ± one standard error", runs,
            ["reward", "majority_baseline"] if len(runs) == 1 else ["reward"],
        ),
        _evaluations(
            "pass", "Held-out pass rate", "pass@k: chance that one of k samples passes", runs,
            [passes[0], passes[-1]] if len(passes) > 1 else passes,
        ),
        _by_group(runs[0]) if len(runs) == 1 else None,
        _evaluations("held-out-length", "Held-out length", "sampled tokens of a completion", runs, ["mean_length"]),
    ]  # fmt: skip
    return [drawing for drawing in drawings if drawing is not None]


def _evaluations(name: str, title: str, unit: str, runs: Sequence[RunData], metrics: Sequence[str]) -> Drawing | None:
    series: list[dict[str, Any]] = []
    for place, run in enumerate(runs):
        for number, metric in enumerate(metrics):
            known = sorted((each for each in run.evaluations if metric in each.metrics), key=lambda each: each.step)
            if not known:
                continue
            plain = _LABELS.get(metric, metric.replace("_", " "))
            label = plain if len(runs) == 1 else run.label if len(metrics) == 1 else f"{run.label}: {plain}"
            values = [each.metrics[metric] for each in known]
            drawn = _points(label, [each.step for each in known], values, place if len(runs) > 1 else number)
            drawn["dash"] = number if len(runs) > 1 or metric in _LABELS else 0
            errors = [each.metrics.get("reward_stderr", 0.0) for each in known]
            if metric == "reward" and any(errors):
                pairs = list(zip(values, errors, strict=True))
                drawn["band"] = [[value - error for value, error in pairs], [value + error for value, error in pairs]]
            series.append(drawn)
    is_rate = bool(metrics) and metrics[0].startswith("pass@")
    options = {"format": "percent", "include": [0.0, 1.0]} if is_rate else {"include": [0.0]}
    return _held_out(name, title, unit, series, [f"eval/{metric}" for metric in metrics], **options)


def _by_group(run: RunData) -> Drawing | None:
    groups = list(dict.fromkeys(group for each in run.evaluations for group in each.by_group))[:_MAX_SERIES]
    series = []
    for number, group in enumerate(groups):
        known = [each for each in run.evaluations if "reward" in each.by_group.get(group, {})]
        known.sort(key=lambda each: each.step)
        values = [each.by_group[group]["reward"] for each in known]
        series.append(_points(group, [each.step for each in known], values, number))
    title, unit = "Held-out reward by group", "mean over the group's prompts"
    return _held_out("held-out-groups", title, unit, series, (), include=[0.0])


def _points(label: str, steps: Sequence[int], values: Sequence[float], color: int) -> dict[str, Any]:
    return {"label": label, "x": steps, "values": values, "points": True, "color": color + 1}


def _held_out(
    name: str, title: str, unit: str, series: Sequence[dict[str, Any]], metrics: Sequence[str], **options: Any
) -> Drawing | None:
    if not series:
        return None
    data = {"kind": "line", "title": title, "unit": unit, "series": series, **options}
    return Drawing(name=name, data=data, metrics=metrics)


# -- histograms


def staleness_histograms(runs: Sequence[RunData]) -> list[Drawing]:
    """Trained tokens by their staleness over the whole run, weighted by the tokens of each step."""
    drawings = []
    for place, run in enumerate(runs):
        names = (name.removeprefix(_STALENESS) for name in run.names(_STALENESS))
        found = [int(name) for name in names if name.isdecimal()]
        ages = range(min(found, default=0), max(found, default=-1) + 1)
        tokens = [
            sum(row.get(f"{_STALENESS}{age}", 0.0) * row.get("num_tokens", 1.0) for row in run.metrics) for age in ages
        ]
        if not any(tokens):
            continue
        several = len(runs) > 1
        title = "Staleness of trained tokens" + (f": {run.label}" if several else "")
        unit = "trained tokens by the steps between sampling and training"
        edges = [age - 0.5 for age in ages] + [ages[-1] + 0.5]
        data = _histogram(title, unit, "staleness", "tokens", edges, [round(count) for count in tokens])
        drawings.append(Drawing(name=f"staleness-histogram{f'-{place + 1}' if several else ''}", data=data))
    return drawings


def rollout_histogram(title: str, unit: str, bins: Histogram | None) -> dict[str, Any]:
    """Of all stored rollouts."""
    edges, counts = ([], []) if bins is None else (bins.edges, bins.counts)
    return _histogram(f"{title} of all stored rollouts", f"rollouts by their {unit}", unit, "rollouts", edges, counts)


def _histogram(
    title: str, unit: str, x_label: str, label: str, edges: Sequence[float], counts: Sequence[int]
) -> dict[str, Any]:
    content = {"kind": "histogram", "title": title, "unit": unit, "xLabel": x_label, "label": label}
    return {**content, "edges": list(edges), "counts": list(counts)}
