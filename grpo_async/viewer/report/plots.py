"""The data of the plots, as charts.js takes it. Pure. Which plots there are: `chapters`.

With one run each metric of a plot has its colour; with several runs each run has its colour, and metrics differ by dashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.viewer.report.chapters import Line, Plot
from grpo_async.viewer.report.curves import Curve, curve, spread
from grpo_async.viewer.report.run_data import RunData

_MOST_SERIES = 8  # colours that keep apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A plot with its data. `data` is for charts.js; `metrics` are the metrics that it shows."""

    name: str
    data: dict[str, Any]
    metrics: Sequence[str]


def draw(plot: Plot, runs: Sequence[RunData]) -> list[Drawing]:
    """The plot of these runs; several for stacked areas of several runs, none where no run has its metrics."""
    if plot.kind == "stacked":
        drawn = [_stacked(plot, run, len(runs) > 1, place) for place, run in enumerate(runs)]
        return [drawing for drawing in drawn if drawing is not None]
    series: list[dict[str, Any]] = []
    metrics: list[str] = []
    for place, run in enumerate(runs):
        lines = [line for line in lines_of(plot, run) if len(runs) == 1 or not line.alone]
        for number, line in enumerate(lines):
            drawn_line = _series(line, run)
            if drawn_line is None:
                continue
            if len(runs) > 1:
                drawn_line["label"] = run.label if len(lines) == 1 else f"{run.label}: {line.label}"
            drawn_line["color"] = (place if len(runs) > 1 else number) % _MOST_SERIES + 1
            drawn_line["dash"] = number % 4 if len(runs) > 1 else (2 if line.alone else number // _MOST_SERIES)
            series.append(drawn_line)
            metrics.append(line.metric)
    if not series:
        return []
    return [Drawing(name=plot.name, data=_options(plot, _shared_x(series)), metrics=list(dict.fromkeys(metrics)))]


def lines_of(plot: Plot, run: RunData) -> list[Line]:
    """The lines of a plot for one run: its own, then those that its pattern finds in the run's metrics, sorted by "
    "name."""
    if plot.pattern is None:
        return list(plot.lines)
    prefix, suffix = plot.pattern
    names = sorted(name for name in run.metric_names if name.startswith(prefix) and name.endswith(suffix))
    found = [Line(metric=name, label=_short(name, prefix, suffix)) for name in names if name not in plot.leave_out]
    if len(found) < plot.least_found:
        return list(plot.lines)
    rank = {label: place for place, label in enumerate(plot.order)}
    return [*plot.lines, *sorted(found, key=lambda line: rank.get(line.label, len(rank)))]


def _short(name: str, prefix: str, suffix: str) -> str:
    return name[len(prefix) : len(name) - len(suffix)].replace("_", " ")


def _series(line: Line, run: RunData) -> dict[str, Any] | None:
    middle = curve(run.metrics, line.metric)
    if middle is None:
        return None
    series: dict[str, Any] = {"label": line.label, "x": middle.steps, "values": middle.values}
    width = curve(run.metrics, line.around) if line.around else None
    bounds = [curve(run.metrics, bound) for bound in line.between or ()]
    if width is not None:
        series["band"] = _within(
            spread(middle, width), *(curve(run.metrics, f"{line.metric}_{end}") for end in ("min", "max"))
        )
    elif bounds and all(bounds):
        series["band"] = [bound.values for bound in bounds if bound is not None]
    elif middle.low and not line.alone:
        series["band"] = [middle.low, middle.high]
    return series


def _within(
    band: tuple[list[float | None], list[float | None]], least: Curve | None, most: Curve | None
) -> list[list[float | None]]:
    """A band cut where no value can be: below the lowest and above the highest."""
    low, high = band
    if least is not None:
        low = [a if a is None or b is None else max(a, b) for a, b in zip(low, least.values, strict=True)]
    if most is not None:
        high = [a if a is None or b is None else min(a, b) for a, b in zip(high, most.values, strict=True)]
    return [low, high]


def _stacked(plot: Plot, run: RunData, is_one_of_several: bool, place: int) -> Drawing | None:
    lines = lines_of(plot, run)
    series = [drawn for line in lines if (drawn := _series(line, run)) is not None]
    series = [each for each in series if any(each["values"])]  # what is 0 everywhere has no area
    if not series:
        return None
    for number, each in enumerate(series):
        each["color"] = number % _MOST_SERIES + 1
        each.pop("band", None)
    options = _options(plot, _shared_x(series))
    if is_one_of_several:
        options["title"] = f"{plot.title}: {run.label}"
    name = f"{plot.name}-{place + 1}" if is_one_of_several else plot.name
    return Drawing(name=name, data=options, metrics=[line.metric for line in lines])


def _shared_x(series: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps once, where all series have the same."""
    first = list(series[0]["x"])
    if all(list(each["x"]) == first for each in series):
        for each in series:
            del each["x"]
        return {"x": first, "series": series}
    return {"series": series}


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
