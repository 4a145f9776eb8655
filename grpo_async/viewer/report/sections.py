"""The sections of the report below its headline, each as HTML. Where a run has nothing for one, the section says so."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from grpo_async.findings import Finding, Severity, find, judge
from grpo_async.tracking.catalog import describe
from grpo_async.viewer.report.configs import differences, flat
from grpo_async.viewer.report.markup import Markup, element, joined, table
from grpo_async.viewer.report.plots import Drawing
from grpo_async.viewer.report.run_data import RunData

_LEVELS = {Severity.ERROR: "bad", Severity.WARNING: "warning", Severity.GOOD: "good", Severity.NOTE: "info"}
_WORDS = {Severity.ERROR: "problem", Severity.WARNING: "look at it", Severity.GOOD: "good", Severity.NOTE: "note"}


def section(name: str, title: str, *content: Markup | None) -> Markup:
    return element(
        "section", element("h2", title, id=f"{name}-title"), *content, id=name, aria_labelledby=f"{name}-title"
    )


def missing(text: str) -> Markup:
    """Says that something is not there, and why."""
    return element("p", text, class_="missing")


def inspect_command(run: RunData, query: str | None, sort: str | None = None) -> str:
    """The line to paste into a shell, from the folder where the report was asked for. `sort`: a field, "-" before it for the
    highest first."""
    words = ["grpo-async", "inspect-rollouts", str(run.run_dir.root), *([query] if query else [])]
    order = None if sort is None else sort.removeprefix("-") if sort.startswith("-") else f"{sort}:asc"
    return shlex.join([*words, *(["--sort", order] if order else [])])


def is_it_learning(runs: Sequence[RunData], drawn: set[str]) -> Markup:
    """The checks of every run: what is bad first. `drawn`: names of the plots that are there, to link to."""
    parts = []
    for run in runs:
        evidence = run.evidence
        found = find(evidence)
        answer = judge(evidence, found)
        level = {True: "good", False: "bad", None: "info"}[answer.is_learning]
        parts.append(
            element(
                "div",
                element("h3", run.label) if len(runs) > 1 else None,
                element("p", answer.text, class_=f"verdict {level}", data_verdict=answer.key),
                element("ul", [_finding(each, run, drawn) for each in found], class_="findings"),
            )
        )
    return section("learning", "Is it learning?", *parts)


def _finding(finding: Finding, run: RunData, drawn: set[str]) -> Markup:
    plot = next((name for name in (finding.plot, f"{finding.plot}-1") if name in drawn), None) if finding.plot else None
    command = None if finding.query is None else inspect_command(run, finding.query, finding.sort)
    return element(
        "li",
        element("p", element("span", _WORDS[finding.severity], class_="badge"), " ", element("strong", finding.what)),
        element(
            "p",
            f"{finding.text} {finding.do}".strip(),
            " ",
            element("a", "See the plot.", href=f"#plot-{plot}") if plot else None,
        ),
        None if command is None else element("pre", element("code", command), class_="command"),
        class_=f"finding {_LEVELS[finding.severity]}",
        data_check=finding.key,
    )


def what_ended_it(run: RunData) -> Markup | None:
    """The error of a run that failed, as the launcher printed it."""
    if not run.ending.error:
        return None
    return element(
        "div",
        element("h3", f"How {run.label} ended"),
        element("pre", run.ending.error.strip(), class_="text error"),
    )


def problems(runs: Sequence[RunData]) -> Markup | None:
    """What could not be read, or is known to be incomplete."""
    lines = [(run.label, problem) for run in runs for problem in run.problems]
    if not lines:
        return None
    items = [element("li", f"{label}: " if len(runs) > 1 else "", problem) for label, problem in lines]
    return element("div", element("h3", "What is missing"), element("ul", items), class_="problems")


def plots(name: str, title: str, drawings: Sequence[Drawing], *, why_not: str) -> Markup:
    """Places for the plots of a chapter, which charts.js fills, with what their metrics are."""
    if not drawings:
        return section(name, title, missing(why_not))
    figures = [
        element(
            "div",
            element("div", id=f"chart-{each.name}"),
            _explained(each.metrics),
            id=f"plot-{each.name}",
            class_="card plot",
        )
        for each in drawings
    ]
    return section(name, title, element("div", figures, class_="grid"))


def _explained(metrics: Sequence[str]) -> Markup | None:
    known = [info for name in metrics if (info := describe(name)).is_known]
    if not known:
        return None
    lines = []
    for info in known:
        better = f" ({info.better.value} is better)" if info.better else ""
        lines.append(joined(element("dt", element("code", info.name)), element("dd", f"{info.help}{better}")))
    return element("details", element("summary", "what is this?"), element("dl", lines), class_="explained")


def evaluation_tables(runs: Sequence[RunData]) -> Markup | None:
    """Every evaluation of every run, and the newest one by group."""
    parts: list[Markup] = []
    for run in runs:
        if not run.evaluations:
            continue
        caption = "Evaluations" if len(runs) == 1 else f"Evaluations of {run.label}"
        names = _evaluation_names(run)
        rows = []
        for each in sorted(run.evaluations, key=lambda evaluation: evaluation.step):
            cells = [_value(each.metrics.get(name)) for name in names]
            when = {"start": "before training", "end": "after training"}.get(each.when, "")
            rows.append([f"step {each.step}{f', {when}' if when else ''}", *cells])
            if each.why_not:
                rows[-1][1:] = [f"none: {each.why_not}", *[""] * (len(names) - 1)]
        heads = ["", *(name.replace("_", " ") for name in names)]
        parts.append(table(heads, rows, caption=caption))
        newest = next((each for each in reversed(run.evaluations) if each.by_group), None)
        if newest is not None:
            groups = [[group, *(_value(v.get(name)) for name in names)] for group, v in newest.by_group.items()]
            groups.append(["all", *(_value(newest.metrics.get(name)) for name in names)])
            parts.append(table(heads, groups, caption=f"By group, at step {newest.step} of {run.label}"))
    return element("div", parts) if parts else None


_LESS_IMPORTANT = ("version_min", "version_max", "mixed", "reward_std")


def _evaluation_names(run: RunData) -> list[str]:
    names = list(dict.fromkeys(name for each in run.evaluations for name in each.metrics))
    first = [name for name in ("reward", "reward_stderr", "num_prompts") if name in names]
    return [*first, *(name for name in names if name not in first and name not in _LESS_IMPORTANT)] or ["reward"]


def _value(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) and abs(value) >= 10 else f"{value:.4g}"


def what_differs(runs: Sequence[RunData]) -> Markup:
    """The settings in which several runs differ."""
    known = [run for run in runs if run.config is not None]
    different = differences([run.config or {} for run in known])
    if not different:
        return element("p", "The settings of the runs are the same.", class_="note")
    rows = [[element("code", each.path), *each.values] for each in different]
    return table(["setting", *(run.label for run in known)], rows, class_="differences", caption="Settings that differ")


def configuration(runs: Sequence[RunData]) -> Markup:
    """All settings of each run that may be shown."""
    known = [run for run in runs if run.config is not None]
    if not known:
        return section("config", "Configuration", missing("No configuration can be read."))
    parts: list[Markup] = []
    for run in known:
        rows_of_run = [[element("code", path), value] for path, value in flat(run.config or {}).items()]
        parts.append(
            element(
                "details",
                element("summary", f"{len(rows_of_run)} settings" + (f" of {run.label}" if len(runs) > 1 else "")),
                table(["setting", "value"], rows_of_run, class_="settings"),
            )
        )
    parts.append(
        element(
            "p",
            "Arguments of your code, addresses, accounts and trackers are left out: they may be secret. All of it "
            "is in config.yaml.",
            class_="note",
        )
    )
    return section("config", "Configuration", *parts)
