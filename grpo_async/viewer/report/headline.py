"""The top of the report: what happened, in one sentence and in figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.findings import figure, percent
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The top of the report for one run: its status (a level for the colour, and a word), one sentence, and its figures."""

    level: str
    status: str
    story: str
    figures: Sequence[tuple[str, str, str]]  # (name, value, note); those that are not known are left out


def headline(run: RunData) -> Headline:
    summary = _summary(run)
    figures = [
        ("held-out reward", *_held_out(run)),
        ("training reward", *_reward(run, summary)),
        ("steps", *_steps(run, summary)),
        ("tokens/s", *_throughput(run, summary)),
        ("trainer idle", *_idle(run, summary)),
        ("staleness", *_staleness(run, summary)),
        ("groups", *_groups(run)),
        ("stored rollouts", *_stored(run)),
    ]
    level, status = _STATUS.get(run.ending.status, ("warning", run.ending.status))
    return Headline(
        level=level, status=status, story=_story(run), figures=[each for each in figures if each[1] != UNKNOWN]
    )


def _story(run: RunData) -> str:
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


def _summary(run: RunData) -> Mapping[str, Any]:
    """summary.json, where it is of the last attempt: one that failed or goes on leaves that of the attempt before."""
    return run.summary if run.ending.status in ("finished", "stopped") else {}


def _held_out(run: RunData) -> tuple[str, str]:
    results = sorted((each for each in run.evaluations if "reward" in each.metrics), key=lambda each: each.step)
    evaluation = run.summary.get("evaluation")
    baseline = _number(evaluation, "majority_baseline") if isinstance(evaluation, Mapping) else None
    note = f"always the most frequent answer: {figure(baseline)}" if baseline is not None else ""
    if not results:
        return UNKNOWN, note
    if len(results) == 1:
        return figure(results[0].metrics["reward"]), note or f"at step {results[0].step}"
    first, last = results[0], results[-1]
    return (
        f"{figure(first.metrics['reward'])} → {figure(last.metrics['reward'])}",
        note or f"steps {first.step} and {last.step}",
    )


def _reward(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str]:
    first, last = _number(summary, "reward_first"), _number(summary, "reward_last")
    rewards = [row["reward"] for row in run.metrics if "reward" in row]
    if first is None or last is None:
        if not rewards:
            return UNKNOWN, ""
        size = min(3, len(rewards))
        first, last = sum(rewards[:size]) / size, sum(rewards[-size:]) / size
    return f"{figure(first)} → {figure(last)}", "all groups of the first and last 3 steps"


def _steps(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str]:
    wall = _number(summary, "wall_s") or sum(row.get("step_time", 0.0) for row in run.metrics)
    planned = f" of {run.max_steps}" if run.max_steps and run.max_steps != run.last_step else ""
    per_step = f"{figure(wall / run.last_step)} s a step" if wall and run.last_step else ""
    note = ", ".join(part for part in (duration(wall) if wall else "", per_step) if part)
    return f"{run.last_step}{planned}", note


def _throughput(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str]:
    generated = _mean(run, summary, "generated_tokens_per_s", "perf/generated_tokens_per_s")
    trained = _mean(run, summary, "trained_tokens_per_s", "perf/trained_tokens_per_s")
    if generated is None or trained is None:
        return UNKNOWN, ""
    engine = summary.get("engine")
    return figure(generated), f"generated{f' by {engine}' if engine else ''}; {figure(trained)} trained"


def _idle(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str]:
    trainer = _mean(run, summary, "trainer_idle_ratio", "pipeline/trainer_idle_ratio")
    generator = _mean(run, summary, "generator_idle_ratio", "pipeline/generator_idle_ratio")
    if trainer is None or generator is None:
        return UNKNOWN, ""
    return percent(trainer), f"servers idle {percent(generator)}"


def _staleness(run: RunData, summary: Mapping[str, Any]) -> tuple[str, str]:
    mean = _mean(run, summary, "staleness_mean", "async/staleness_mean")
    most = max((row["async/staleness_max"] for row in run.metrics if "async/staleness_max" in row), default=None)
    if mean is None:
        return UNKNOWN, ""
    return f"{mean:.2f}", "steps in the mean" + ("" if most is None else f", most {most:.0f}")


def _groups(run: RunData) -> tuple[str, str]:
    last = next((row for row in reversed(run.metrics) if "ledger/groups/started" in row), None)
    if last is None:
        return UNKNOWN, ""
    states = ("trained", "filtered", "stale", "failed", "cancelled")
    parts = [f"{last[name]:.0f} {state}" for state in states if last.get(name := f"ledger/groups/{state}")]
    return f"{last['ledger/groups/started']:,.0f}", ", ".join(parts)


def _stored(run: RunData) -> tuple[str, str]:
    if not run.rollouts.num_rollouts:
        return UNKNOWN, ""
    return f"{run.rollouts.num_rollouts:,}", f"in {run.rollouts.num_groups:,} groups"


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
