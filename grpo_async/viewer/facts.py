"""What a run reached, in a few numbers with notes: the same in the terminal, the page and the report."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from grpo_async.findings import RunHistory
from grpo_async.findings.statistics import mean_over_time
from grpo_async.records import LEDGER_STATUSES
from grpo_async.utils.run_state import FINISHED, STOPPED
from grpo_async.utils.text import count, duration, finite, format_number, percent

Fact = tuple[str, str, str]
"""Name, value, and a note about it."""


def facts_of(run: RunHistory) -> list[Fact]:
    """What is known of a run; what is not is left out."""
    return [(name, value, note) for name, value, note in _facts(run, summary_of(run)) if value]


def summary_of(run: RunHistory) -> dict[str, Any]:
    """summary.json, if it is of this attempt: of one that failed or still runs it is not."""
    return dict(run.summary) if run.status in (FINISHED, STOPPED) else {}


def trained_s(run: RunHistory) -> float:
    return finite(summary_of(run).get("wall_s")) or sum(run.values("step_time"))


def _facts(run: RunHistory, summary: dict[str, Any]) -> Iterator[Fact]:
    yield _held_out(run)
    yield "training reward", _from_first_to_last(run, "reward"), "all groups of the first and last 3 steps"
    for name in run.names("source/"):
        if name.endswith("/reward"):
            yield name.split("/")[1], _from_first_to_last(run, name), "reward"
    yield _steps(run)
    generated, trained = (mean_over_time(run.metrics, f"perf/{what}_tokens_per_s") for what in ("generated", "trained"))
    if generated is not None and trained is not None:
        by_engine = f" by {run.engine}" if run.engine else ""
        yield "tokens/s", format_number(generated), f"generated{by_engine}; {format_number(trained)} trained"
    idle, servers_idle = (mean_over_time(run.metrics, f"pipeline/{who}_idle_ratio") for who in ("trainer", "generator"))
    if idle is not None and servers_idle is not None:
        yield "trainer idle", percent(idle), f"servers idle {percent(servers_idle)}"
    if stale := run.values("async/staleness_mean"):
        most = max(run.values("async/staleness_max"), default=0.0)
        yield "staleness", f"{fmean(stale):.2f}", f"mean, in steps; at most {most:.0f}"
    yield _groups(run, summary)
    yield _failures(summary)


def _held_out(run: RunHistory) -> Fact:
    results = run.evaluated()
    if not results:
        return "held-out reward", "", ""
    first, last = results[0], results[-1]
    baseline = last.metrics.get("majority_baseline")
    note = "" if baseline is None else f"always the most frequent answer: {format_number(baseline)}"
    if len(results) == 1:
        return "held-out reward", format_number(first.metrics["reward"]), note or f"at step {first.step}"
    change = f"{format_number(first.metrics['reward'])} → {format_number(last.metrics['reward'])}"
    return "held-out reward", change, note or f"steps {first.step} and {last.step}"


def _from_first_to_last(run: RunHistory, name: str) -> str:
    values = run.values(name)
    return f"{format_number(fmean(values[:3]))} → {format_number(fmean(values[-3:]))}" if values else ""


def _steps(run: RunHistory) -> Fact:
    wall_s = trained_s(run)
    planned = f" of {run.max_steps}" if run.max_steps and run.max_steps != run.last_step else ""
    per_step = f", {format_number(wall_s / run.last_step)} s per step" if run.last_step else ""
    return "steps", f"{run.last_step}{planned}", f"{duration(round(wall_s))}{per_step}" if wall_s else ""


def _groups(run: RunHistory, summary: dict[str, Any]) -> Fact:
    last = next((row for row in reversed(run.metrics) if "ledger/groups/started" in row), {})
    groups = (summary.get("ledger") or {}).get("groups") or {
        state: last.get(f"ledger/groups/{state}", 0.0) for state in ("started", *LEDGER_STATUSES)
    }
    if not groups["started"]:
        return "groups", "", ""
    parts = [f"{groups[state]:.0f} {state.replace('_', ' ')}" for state in LEDGER_STATUSES if groups.get(state)]
    if (is_balanced := summary.get("ledger_closed")) is not None:
        parts.append("balanced" if is_balanced else "NOT BALANCED: groups are missing, please report this")
    return "groups", f"{groups['started']:,.0f}", ", ".join(parts)


def _failures(summary: dict[str, Any]) -> Fact:
    """`2 failures`, `recovered after 12.3 s; not recovered: server 1 (hung)`."""
    failures = summary.get("server_failures") or ()
    recovered = [f"{each['recovery_s']:.1f}" for each in failures if each.get("recovery_s") is not None]
    lost = [f"{each.get('server')} ({each.get('reason')})" for each in failures if each.get("recovery_s") is None]
    notes = [f"recovered after {', '.join(recovered)} s" if recovered else ""]
    notes.append(f"not recovered: {', '.join(lost)}" if lost else "")
    return "servers", count(len(failures), "failure") if failures else "", "; ".join(filter(None, notes))
