"""The top of a run's page: what happened, in one sentence and in numbers. Pure."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from grpo_async.findings import RunHistory
from grpo_async.findings.statistics import mean_over_time
from grpo_async.records import FINAL_STATUSES
from grpo_async.utils.run_state import (
    EVALUATED,
    FAILED,
    FINISHED,
    KILLED,
    LEVELS,
    RUNNING,
    SILENT,
    STOPPED,
    UNFINISHED,
)
from grpo_async.utils.text import count, duration, finite, format_number, percent

Number = tuple[str, str]
"""A value, and a note about it."""


def headline(run: RunHistory) -> dict[str, Any]:
    """The top of a run's page: status (a level for the color, and a word), one sentence, and numbers with notes; those that are not
    known are left out."""
    # where this attempt failed or still runs, the summary is that of the attempt before
    summary = run.summary if run.status in (FINISHED, STOPPED) else {}
    wall_s = finite(summary.get("wall_s")) or sum(run.values("step_time"))
    numbers = {
        "held-out reward": _held_out(run),
        "training reward": _reward(run),
        "steps": _steps(run, wall_s),
        "tokens/s": _throughput(run),
        "trainer idle": _idle(run),
        "groups": _groups(run),
    }
    return {
        "level": LEVELS.get(run.status, "warning"),
        "status": "not finished" if run.status == UNFINISHED else run.status,
        "outcome": _outcome(run, wall_s),
        "statistics": [(name, *found) for name, found in numbers.items() if found is not None],
    }


def _outcome(run: RunHistory, wall_s: float) -> str:
    """One sentence: what happened."""
    done = f"{run.last_step} of {run.max_steps} steps" if run.max_steps else count(run.last_step, "step")
    if run.purpose == "evaluation":
        return "The evaluation finished." if run.status == FINISHED else f"The evaluation is {run.status}."
    steps = f"{done}{f', {duration(round(wall_s))} of training' if wall_s else ''}"
    # evaluation and export come after the last step
    has_all = run.max_steps is not None and run.last_step >= run.max_steps
    then = ", before its end; --resume does the rest." if has_all else "; --resume continues it."
    stopped = f"The run was stopped after {steps}{then}"
    if has_all and (run.summary.get("status"), run.summary.get("steps")) == (FINISHED, run.last_step):
        stopped = f"The run finished after {steps}; it was stopped while it ended."
    how = {
        FINISHED: f"The run finished after {steps}.",
        EVALUATED: "A model was evaluated, and nothing was trained.",
        STOPPED: stopped,
        FAILED: f"The run failed after {steps}.",
        RUNNING: f"The run is in progress: {steps} so far.",
        KILLED: f"The run was killed after {steps}{then}",
        SILENT: f"The run has {steps}; its launcher, on another machine, has written nothing for a while.",
        UNFINISHED: f"The run has {steps}. It is still running, or it was killed.",
    }
    return how.get(run.status, f"{run.status}: {steps}.")


def _held_out(run: RunHistory) -> Number | None:
    results = run.evaluated()
    if not results:
        return None
    first, last = results[0], results[-1]
    baseline = last.metrics.get("majority_baseline")
    note = "" if baseline is None else f"always the most frequent answer: {format_number(baseline)}"
    if len(results) == 1:
        return format_number(first.metrics["reward"]), note or f"at step {first.step}"
    change = f"{format_number(first.metrics['reward'])} → {format_number(last.metrics['reward'])}"
    return change, note or f"steps {first.step} and {last.step}"


def _reward(run: RunHistory) -> Number | None:
    rewards = run.values("reward")
    if not rewards:
        return None
    first, last = fmean(rewards[:3]), fmean(rewards[-3:])
    return f"{format_number(first)} → {format_number(last)}", "all groups of the first and last 3 steps"


def _steps(run: RunHistory, wall_s: float) -> Number:
    planned = f" of {run.max_steps}" if run.max_steps and run.max_steps != run.last_step else ""
    per_step = f", {format_number(wall_s / run.last_step)} s per step" if run.last_step else ""
    return f"{run.last_step}{planned}", f"{duration(round(wall_s))}{per_step}" if wall_s else ""


def _throughput(run: RunHistory) -> Number | None:
    generated, trained = (mean_over_time(run.metrics, f"perf/{what}_tokens_per_s") for what in ("generated", "trained"))
    if generated is None or trained is None:
        return None
    by_engine = f" by {run.engine}" if run.engine else ""
    return format_number(generated), f"generated{by_engine}; {format_number(trained)} trained"


def _idle(run: RunHistory) -> Number | None:
    trainer, generator = (mean_over_time(run.metrics, f"pipeline/{who}_idle_ratio") for who in ("trainer", "generator"))
    return None if trainer is None or generator is None else (percent(trainer), f"servers idle {percent(generator)}")


def _groups(run: RunHistory) -> Number | None:
    last = next((row for row in reversed(run.metrics) if "ledger/groups/started" in row), None)
    if last is None:
        return None
    parts = [f"{last[name]:.0f} {state}" for state in FINAL_STATUSES if last.get(name := f"ledger/groups/{state}")]
    return f"{last['ledger/groups/started']:,.0f}", ", ".join(parts)
