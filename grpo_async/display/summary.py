"""What a run reached, as a table for the terminal, from the content of summary.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_async.checks.memory import describe_peak
from grpo_async.display.evaluation_table import print_evaluation
from grpo_async.display.progress import LEDGER_STATES, duration
from grpo_async.processes.wording import plain


def print_summary(console: Console, summary: Mapping[str, Any], run_dir: Path, *, report: Path | None = None) -> None:
    """Print the table and what to do next. Fields that the summary lacks are left out. `report`: the page, if one is written."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(summary, run_dir):
        table.add_row(name, Text(value))
    console.print(table)
    _print_evaluation(console, summary.get("evaluation"))
    console.print(Text("\nnext:"))
    for command in _next_commands(summary, run_dir, report):
        console.print(Text(f"  {command}"), soft_wrap=True)


def _rows(summary: Mapping[str, Any], run_dir: Path) -> Iterator[tuple[str, str]]:
    took = duration(_number(summary, "wall_s") or 0.0)
    yield "run", f"{summary.get('status', '?')} after {summary.get('steps', '?')} steps in {took}"
    learning = summary.get("learning")
    if isinstance(learning, Mapping) and learning.get("text"):
        yield "learning", plain(str(learning["text"]))
    first, last = _number(summary, "reward_first"), _number(summary, "reward_last")
    if first is not None and last is not None:
        yield "reward", f"{first:.3f} -> {last:.3f} (all groups of the first and last 3 steps, {last - first:+.3f})"
    yield from _held_out(summary.get("evaluation"))
    generated, trained = _number(summary, "generated_tokens_per_s"), _number(summary, "trained_tokens_per_s")
    if generated is not None and trained is not None:
        yield "tokens/s", f"{generated:.0f} generated, {trained:.0f} trained ({summary.get('engine', '?')} engine)"
    idle = [(who, _number(summary, f"{who}_idle_ratio")) for who in ("trainer", "generator")]
    if known := [f"{who} {ratio:.0%}" for who, ratio in idle if ratio is not None]:
        yield "idle", ", ".join(known)
    if (overlap := _number(summary, "overlap_efficiency")) is not None:
        yield "overlap", f"{overlap:.0%} efficiency"
    mean, most = _number(summary, "staleness_mean"), _number(summary, "staleness_max")
    if mean is not None and most is not None:
        yield "staleness", f"mean {mean:.2f}, max {most:.0f} steps"
    yield from _ledger(summary)
    yield from _memory(summary)
    yield from _server_failures(summary.get("server_failures"))
    yield "directory", str(run_dir)
    if summary.get("model"):
        yield "model", str(summary["model"])


def _held_out(evaluation: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(evaluation, Mapping):
        return
    results = [(when, _number(evaluation.get(when) or {}, "reward")) for when in ("before", "after")]
    text = ", ".join(f"{value:.3f} {when}" for when, value in results if value is not None)
    baseline = _number(evaluation, "majority_baseline")
    if baseline is not None:
        text += f" (always the most frequent answer: {baseline:.3f})"
    if text:
        yield "held out", text


def _print_evaluation(console: Console, evaluation: Any) -> None:
    """The last whole one, where it says more than the line above it does: parts of the data, or several samples."""
    if not isinstance(evaluation, Mapping):
        return
    for when in ("after", "before"):
        metrics = evaluation.get(when)
        by_group = (evaluation.get("by_group") or {}).get(when) or {}
        if isinstance(metrics, Mapping) and (by_group or "pass@2" in metrics):
            console.print()
            group_by = evaluation.get("group_by")
            print_evaluation(console, metrics, by_group, group_by=group_by, title=f"held out, {when} training")
            return


def _ledger(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    ledger = summary.get("ledger")
    groups = ledger.get("groups") if isinstance(ledger, Mapping) else None
    if not isinstance(groups, Mapping):
        return
    parts = [f"{groups[state]} {state.replace('_', ' ')}" for state in LEDGER_STATES if groups.get(state)]
    closed = "closed" if summary.get("ledger_closed") else "NOT CLOSED: groups are missing, please report this"
    yield "groups", f"{groups.get('started', '?')} started = {' + '.join(parts) or '0'} ({closed})"


def _memory(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    memory = summary.get("memory")
    if isinstance(memory, Mapping) and memory.get("peaks"):
        on_gpu = bool(summary.get("on_gpu"))
        words = describe_peak(memory["peaks"], memory.get("estimated", math.nan), on_gpu=on_gpu)
        yield "memory", f"after its first step a rank had taken {words}"


def _server_failures(failures: Any) -> Iterator[tuple[str, str]]:
    """`2 failures, recovered after 12.3, 8.0 s; not recovered: server 1 (hung)`; nothing where there were none."""
    if not isinstance(failures, Sequence) or isinstance(failures, str):
        return
    entries = [failure for failure in failures if isinstance(failure, Mapping)]
    if not entries:
        return
    recovered = [seconds for failure in entries if (seconds := _number(failure, "recovery_s")) is not None]
    parts = [f"{len(entries)} failure{'' if len(entries) == 1 else 's'}"]
    if recovered:
        parts.append(f"recovered after {', '.join(f'{seconds:.1f}' for seconds in recovered)} s")
    text = ", ".join(parts)
    lost = [failure for failure in entries if _number(failure, "recovery_s") is None]
    if lost:
        text += "; not recovered: " + ", ".join(
            f"{entry.get('server', '?')} ({entry.get('reason', '?')})" for entry in lost
        )
    yield "servers", plain(text)


def _next_commands(summary: Mapping[str, Any], run_dir: Path, report: Path | None) -> Iterator[str]:
    if report is not None:
        yield f"{report}    # open it in a browser: does it learn, and why not"
    yield f"grpo-async inspect-rollouts {run_dir}    # read what was generated, and its rewards"
    if summary.get("status") == "stopped":
        yield f"grpo-async train {run_dir / 'config.yaml'} --resume auto    # go on from the checkpoint"


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
