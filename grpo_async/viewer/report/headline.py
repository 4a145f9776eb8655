"""The top of the report: what happened, in figures. One run as tiles, several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.findings import figure, percent
from grpo_async.viewer.report.markup import Markup, element, joined, table
from grpo_async.viewer.report.run_data import RunData

_STATUS = {
    "finished": ("good", "finished"),
    "stopped": ("warning", "stopped"),
    "failed": ("bad", "failed"),
    "running": ("info", "running"),
    "killed": ("bad", "killed"),
    "silent": ("warning", "silent"),
    "unfinished": ("warning", "not finished"),
}
UNKNOWN = "–"


def pill(run: RunData) -> Markup:
    """The run's status as a small label."""
    level, text = _STATUS.get(run.ending.status, ("warning", run.ending.status))
    return element("span", text, class_=f"pill {level}")


def tiles(run: RunData) -> Markup:
    """The figures of one run; those that are not known are left out."""
    made = [_tile(name, value, note) for name, value, note in _figures(run) if value != UNKNOWN]
    return element("div", made, class_="tiles")


def side_by_side(runs: Sequence[RunData]) -> Markup:
    """The same figures of several runs, a column each."""
    columns = [{name: (value, note) for name, value, note in _figures(run)} for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows: list[list[Any]] = [["status", *(pill(run) for run in runs)]]
    for name in names:
        cells = [column.get(name, (UNKNOWN, "")) for column in columns]
        if any(value != UNKNOWN for value, _ in cells):
            rows.append([name, *(_cell(value, note) for value, note in cells)])
    return table(["", *(run.label for run in runs)], rows, class_="figures")


def story(run: RunData) -> str:
    """One sentence: what happened."""
    planned = f" of {run.max_steps}" if run.max_steps else ""
    steps = f"{run.last_step}{planned} steps"
    took = _number(_summary(run), "wall_s") or sum(row.get("step_time", 0.0) for row in run.metrics)
    time = f" in {duration(took)}" if took else ""
    how = {
        "finished": f"The run finished after {steps}{time}.",
        "stopped": f"The run was stopped after {steps}{time}; it can go on with --resume.",
        "failed": f"The run failed after {steps}{time}.",
        "running": f"The run goes on: {steps}{time} so far.",
        "killed": f"The run was killed after {steps}{time}, without a word; it can go on with --resume.",
        "silent": f"The run has {steps}{time}; its launcher, on another machine, has written nothing for a while.",
        "unfinished": f"The run has {steps}{time}. It still goes on, or it was killed.",
    }
    return how.get(run.ending.status, f"{run.ending.status}: {steps}{time}.")


def _tile(name: str, value: str, note: str) -> Markup:
    return element(
        "div",
        element("p", name, class_="tile-name"),
        element("p", value, class_="tile-value"),
        element("p", note, class_="tile-note") if note else None,
        class_="tile",
    )


def _cell(value: str, note: str) -> Markup:
    return joined(value, element("span", note, class_="cell-note") if note else None)


def _figures(run: RunData) -> list[tuple[str, str, str]]:
    """(name, value, note) of everything that the headline says."""
    summary = _summary(run)
    return [
        _held_out(run),
        _reward(run, summary),
        _steps(run, summary),
        _throughput(run, summary),
        _idle(run, summary),
        _staleness(run, summary),
        _groups(run),
        _stored(run),
    ]


def _summary(run: RunData) -> Mapping[str, Any]:
    """summary.json, where it is of the last attempt: one that failed or goes on leaves that of the attempt before."""
    return run.summary if run.ending.status in ("finished", "stopped") else {}


def _held_out(run: RunData) -> tuple[str, str, str]:
    results = sorted((each for each in run.evaluations if "reward" in each.metrics), key=lambda each: each.step)
    evaluation = run.summary.get("evaluation")
    baseline = _number(evaluation, "majority_baseline") if isinstance(evaluation, Mapping) else None
    note = f"always the most frequent answer: {figure(baseline)}" if baseline is not None else ""
    if not results:
        return "held-out reward", UNKNOWN, note
    if len(results) == 1:
        return "held-out reward", figure(results[0].metrics["reward"]), note or f"at step {results[0].step}"
    first, last = results[0], results[-1]
    return (
        "held-out reward",
        f"{figure(first.metrics['reward'])} → {figure(last.metrics['reward'])}",
        note or f"steps {first.step} and {last.step}",
    )


def _reward(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str, str]:
    first, last = _number(summary, "reward_first"), _number(summary, "reward_last")
    rewards = [row["reward"] for row in run.metrics if "reward" in row]
    if first is None or last is None:
        if not rewards:
            return "training reward", UNKNOWN, ""
        size = min(3, len(rewards))
        first, last = sum(rewards[:size]) / size, sum(rewards[-size:]) / size
    return "training reward", f"{figure(first)} → {figure(last)}", "all groups of the first and last 3 steps"


def _steps(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str, str]:
    wall = _number(summary, "wall_s") or sum(row.get("step_time", 0.0) for row in run.metrics)
    planned = f" of {run.max_steps}" if run.max_steps and run.max_steps != run.last_step else ""
    per_step = f"{figure(wall / run.last_step)} s a step" if wall and run.last_step else ""
    note = ", ".join(part for part in (duration(wall) if wall else "", per_step) if part)
    return "steps", f"{run.last_step}{planned}", note


def _throughput(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str, str]:
    generated = _mean(run, summary, "generated_tokens_per_s", "perf/generated_tokens_per_s")
    trained = _mean(run, summary, "trained_tokens_per_s", "perf/trained_tokens_per_s")
    if generated is None or trained is None:
        return "tokens/s", UNKNOWN, ""
    engine = summary.get("engine")
    return "tokens/s", figure(generated), f"generated{f' by {engine}' if engine else ''}; {figure(trained)} trained"


def _idle(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str, str]:
    trainer = _mean(run, summary, "trainer_idle_ratio", "pipeline/trainer_idle_ratio")
    generator = _mean(run, summary, "generator_idle_ratio", "pipeline/generator_idle_ratio")
    if trainer is None or generator is None:
        return "trainer idle", UNKNOWN, ""
    return "trainer idle", percent(trainer), f"servers idle {percent(generator)}"


def _staleness(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str, str]:
    mean = _mean(run, summary, "staleness_mean", "async/staleness_mean")
    most = max((row["async/staleness_max"] for row in run.metrics if "async/staleness_max" in row), default=None)
    if mean is None:
        return "staleness", UNKNOWN, ""
    return "staleness", f"{mean:.2f}", "steps in the mean" + ("" if most is None else f", most {most:.0f}")


def _groups(run: RunData) -> tuple[str, str, str]:
    last = next((row for row in reversed(run.metrics) if "ledger/groups/started" in row), None)
    if last is None:
        return "groups", UNKNOWN, ""
    states = ("trained", "filtered", "stale", "failed", "cancelled")
    parts = [f"{last[name]:.0f} {state}" for state in states if last.get(name := f"ledger/groups/{state}")]
    return "groups", f"{last['ledger/groups/started']:,.0f}", ", ".join(parts)


def _stored(run: RunData) -> tuple[str, str, str]:
    if not run.rollouts.num_rollouts:
        return "stored rollouts", UNKNOWN, ""
    return "stored rollouts", f"{run.rollouts.num_rollouts:,}", f"in {run.rollouts.num_groups:,} groups"


def _mean(run: RunData, summary: Mapping[str, Any], name: str, metric: str) -> float | None:
    """Of the summary; where it is not there, over the steps' wall time."""
    whole = _number(summary, name)
    if whole is not None:
        return whole
    pairs = [(row[metric], row.get("step_time", 1.0)) for row in run.metrics if metric in row]
    total = sum(seconds for _, seconds in pairs)
    return sum(value * seconds for value, seconds in pairs) / total if total else None


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def duration(seconds: float) -> str:
    """75 -> "1:15"; 3725 -> "1:02:05"; 4 -> "4 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
