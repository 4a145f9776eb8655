"""Plots that are not simply metrics by step: held-out results, histograms of staleness, rewards and lengths. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_async.viewer.report.plots import Drawing
from grpo_async.viewer.report.rollouts import Bins
from grpo_async.viewer.report.run_data import RunData

_STALENESS = "async/staleness/"
_MOST_GROUPS = 8
_MOST_NAMED = 16  # bins of one whole number each that have their number below
_HISTOGRAMS = (("rewards", "Rewards", "reward"), ("lengths", "Lengths", "tokens"))


def held_out_plots(runs: Sequence[RunData]) -> list[Drawing]:
    """The held-out reward with its standard error; pass@k; and for a single run the reward by group."""
    drawings = [
        _evaluation_plot(
            "held-out", "Held-out reward", "mean over the prompts, band ± one standard error", runs, ["reward"]
        ),
        _evaluation_plot(
            "pass", "Held-out pass rate", "pass@k: chance that one of k samples passes", runs, _pass_names(runs)
        ),
        _by_group(runs[0]) if len(runs) == 1 else None,
        _evaluation_plot("held-out-length", "Held-out length", "sampled tokens of a completion", runs, ["mean_length"]),
    ]
    return [drawing for drawing in drawings if drawing is not None]


def _pass_names(runs: Sequence[RunData]) -> list[str]:
    names = {name for run in runs for each in run.evaluations for name in each.metrics if name.startswith("pass@")}
    ordered = sorted(names, key=lambda name: int(name.removeprefix("pass@") or 0))
    return [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered


def _evaluation_plot(
    name: str, title: str, unit: str, runs: Sequence[RunData], metrics: Sequence[str]
) -> Drawing | None:
    series: list[dict[str, Any]] = []
    for place, run in enumerate(runs):
        for number, metric in enumerate(metrics):
            known = sorted((each for each in run.evaluations if metric in each.metrics), key=lambda each: each.step)
            if not known:
                continue
            values = [each.metrics[metric] for each in known]
            plain = metric.replace("_", " ")
            label = plain if len(runs) == 1 else run.label if len(metrics) == 1 else f"{run.label}: {plain}"
            drawn: dict[str, Any] = {
                "label": label,
                "x": [each.step for each in known],
                "values": values,
                "points": True,
                "color": (place if len(runs) > 1 else number) + 1,
                "dash": number if len(runs) > 1 else 0,
            }
            errors = [each.metrics.get("reward_stderr", 0.0) for each in known]
            if metric == "reward" and any(errors):
                drawn["band"] = [
                    [value - error for value, error in zip(values, errors, strict=True)],
                    [value + error for value, error in zip(values, errors, strict=True)],
                ]
            series.append(drawn)
    if not series:
        return None
    is_share = metrics[0].startswith("pass@")
    data = {
        "kind": "line",
        "title": title,
        "unit": unit,
        "format": "percent" if is_share else "number",
        "include": [0.0, 1.0] if is_share else [0.0],
        "series": series,
    }
    return Drawing(name=name, data=data, metrics=[f"eval/{metric}" for metric in metrics])


def _by_group(run: RunData) -> Drawing | None:
    groups = list(dict.fromkeys(group for each in run.evaluations for group in each.by_group))[:_MOST_GROUPS]
    series = []
    for number, group in enumerate(groups):
        known = sorted(
            (each for each in run.evaluations if "reward" in each.by_group.get(group, {})), key=lambda each: each.step
        )
        steps, values = [each.step for each in known], [each.by_group[group]["reward"] for each in known]
        series.append({"label": group, "x": steps, "values": values, "points": True, "color": number + 1})
    if not series:
        return None
    data = {
        "kind": "line",
        "title": "Held-out reward by group",
        "unit": "mean over the group's prompts",
        "series": series,
        "include": [0.0],
    }
    return Drawing(name="held-out-groups", data=data, metrics=[])


def staleness_histograms(runs: Sequence[RunData]) -> list[Drawing]:
    """Trained tokens by their staleness over the whole run, weighed by the tokens of each step."""
    drawings = []
    for place, run in enumerate(runs):
        ages = sorted(int(age) for name in run.metric_names if (age := _age(name)) is not None)
        tokens = [
            sum(row.get(f"{_STALENESS}{age}", 0.0) * row.get("num_tokens", 1.0) for row in run.metrics) for age in ages
        ]
        if not any(tokens):
            continue
        data = {
            "kind": "histogram",
            "title": "Staleness of trained tokens" + (f": {run.label}" if len(runs) > 1 else ""),
            "unit": "trained tokens by the steps between sampling and training",
            "edges": [age - 0.5 for age in ages] + [ages[-1] + 0.5],
            "counts": [round(count) for count in tokens],
            "names": ages,
            "xLabel": "staleness",
            "label": "tokens",
        }
        name = f"staleness-histogram-{place + 1}" if len(runs) > 1 else "staleness-histogram"
        drawings.append(Drawing(name=name, data=data, metrics=[]))
    return drawings


def _age(name: str) -> str | None:
    age = name.removeprefix(_STALENESS)
    return age if name.startswith(_STALENESS) and age.isdecimal() else None


def histograms(run: RunData) -> list[tuple[str, dict[str, Any]]]:
    """(kind, data) of the histograms over all stored rollouts of a run."""
    if not run.rollouts.num_rollouts:
        return []
    return [
        (kind, _histogram(title, unit, run.rollouts.rewards if kind == "rewards" else run.rollouts.lengths))
        for kind, title, unit in _HISTOGRAMS
    ]


def _histogram(title: str, unit: str, bins: Bins | None) -> dict[str, Any]:
    edges = [] if bins is None else list(bins.edges)
    are_whole = 0 < len(edges) <= _MOST_NAMED and all((edge - 0.5).is_integer() for edge in edges)
    return {
        "kind": "histogram",
        "title": f"{title} of all stored rollouts",
        "unit": f"rollouts by their {unit}",
        "edges": edges,
        **({"names": [round(edge + 0.5) for edge in edges[:-1]]} if are_whole else {}),
        "counts": [] if bins is None else list(bins.counts),
        "xLabel": unit,
        "label": "rollouts",
    }
