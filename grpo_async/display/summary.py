"""What a run reached, from the content of summary.json, and the numbers of an evaluation: tables for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_async.display.render import PASS_OR_MEAN_AT_K, diagnosis_rows, join
from grpo_async.records import LEDGER_STATUSES
from grpo_async.run_directory import RunDir
from grpo_async.utils.console import print_rows
from grpo_async.utils.run_state import STOPPED
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import clipped, count, duration, finite

_FIRST = ("num_prompts", "reward", "reward_stderr")
_LAST = ("mean_length", "truncated", "num_failed", "num_unscored")
_WHOLE = ("num_prompts", "num_failed", "num_unscored")
_NAMES = {
    "num_prompts": "prompts",
    "reward_stderr": "+-",
    "mean_length": "length",
    "num_failed": "failed",
    "num_unscored": "unscored",
}
_MAX_NAME = 18


def print_summary(console: Console, summary: Mapping[str, Any], run_dir: Path, *, report: Path | None = None) -> None:
    """Print the table and what to do next. Fields that the summary lacks are left out. `report`: the page, if one is written."""
    rows = [
        *((name, text) for name, text, _ in diagnosis_rows(summary.get("learning"))),
        ("run", f"{summary.get('status', '?')} after {_steps(summary)}"),
        *summary_rows(summary),
        ("directory", str(run_dir)),
        ("model", str(summary.get("model") or "")),
    ]
    print_rows(console, [(name, Text(plain(value))) for name, value in rows if value])
    _print_evaluation(console, summary.get("evaluation") or {})
    console.print(Text("\nnext:"))
    for command in _next_commands(summary, run_dir, report):
        console.print(Text(f"  {command}"), soft_wrap=True)


def summary_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of what a run reached; a text is empty where the summary lacks it."""

    def text(form: str, *names: str) -> str | None:
        """The numbers of these names in `form`, or None where one is missing or not finite."""
        values = [value for name in names if (value := finite(summary.get(name))) is not None]
        return form.format(*values) if len(values) == len(names) else None

    if (took := finite(summary.get("wall_s"))) is not None:
        yield "training", f"{_steps(summary)} in {duration(round(took))}"
    first, last = finite(summary.get("reward_first")), finite(summary.get("reward_last"))
    if first is not None and last is not None:
        yield "reward", f"{first:.3f} -> {last:.3f} (all groups of the first and last 3 steps, {last - first:+.3f})"
    for name in summary:
        if name.startswith("source/") and name.endswith("/reward_first"):
            source = name.removesuffix("_first")
            yield source.split("/")[1], text("reward {:.3f} -> {:.3f}", name, f"{source}_last") or ""
    yield "held out", _held_out(summary.get("evaluation") or {})
    tokens = text("{:.0f} generated, {:.0f} trained", "generated_tokens_per_s", "trained_tokens_per_s")
    yield "tokens/s", f"{tokens} ({summary.get('engine', '?')} engine)" if tokens else ""
    idle = [text("trainer {:.0%}", "trainer_idle_ratio"), text("servers {:.0%}", "generator_idle_ratio")]
    yield "idle", join(idle, ", ")
    yield "overlap", text("{:.0%} efficiency", "overlap_efficiency") or ""
    yield "staleness", text("mean {:.2f}, max {:.0f} steps", "staleness_mean", "staleness_max") or ""
    if groups := (summary.get("ledger") or {}).get("groups"):
        parts = [f"{groups[state]} {state.replace('_', ' ')}" for state in LEDGER_STATUSES if groups.get(state)]
        balance = "balanced" if summary.get("ledger_closed") else "NOT BALANCED: groups are missing, please report this"
        yield "groups", f"{groups.get('started', '?')} started = {' + '.join(parts) or '0'} ({balance})"
    yield "servers", _server_failures(summary.get("server_failures") or ())


def _steps(summary: Mapping[str, Any]) -> str:
    steps = finite(summary.get("steps"))
    return "? steps" if steps is None else count(int(steps), "step")


def _held_out(evaluation: Mapping[str, Any]) -> str:
    results = [(when, finite((evaluation.get(when) or {}).get("reward"))) for when in ("before", "after")]
    text = ", ".join(f"{value:.3f} {when}" for when, value in results if value is not None)
    baseline = finite(evaluation.get("majority_baseline"))
    return f"{text} (always the most frequent answer: {baseline:.3f})" if text and baseline is not None else text


def _server_failures(failures: Sequence[Mapping[str, Any]]) -> str:
    """`2 failures, recovered after 12.3, 8.0 s; not recovered: server 1 (hung)`; empty where there were none."""
    if not failures:
        return ""
    recovered = [f"{seconds:.1f}" for failure in failures if (seconds := finite(failure.get("recovery_s"))) is not None]
    lost = [f"{each.get('server')} ({each.get('reason')})" for each in failures if each.get("recovery_s") is None]
    text = count(len(failures), "failure")
    text += f", recovered after {', '.join(recovered)} s" if recovered else ""
    return f"{text}; not recovered: {', '.join(lost)}" if lost else text


def _next_commands(summary: Mapping[str, Any], run_dir: Path, report: Path | None) -> Iterator[str]:
    if report is not None:
        yield f"{report}    # open it in a browser: does it learn, and why not"
    yield f"grpo-async inspect-rollouts {shlex.quote(str(run_dir))}    # read what was generated, and its rewards"
    if summary.get("status") == STOPPED:
        # it has a model when only the last evaluation is left
        what = "make the evaluation after training" if summary.get("model") else "continue from the checkpoint"
        yield f"grpo-async train {shlex.quote(str(RunDir(run_dir).config))} --resume latest    # {what}"


def _print_evaluation(console: Console, evaluation: Mapping[str, Any]) -> None:
    """The last whole one, where it says more than the line above it does: parts of the data, or several samples."""
    for when in ("after", "before"):
        metrics = evaluation.get(when)
        by_group = (evaluation.get("by_group") or {}).get(when) or {}
        if metrics and (by_group or "pass@2" in metrics):
            console.print()
            group_by = evaluation.get("group_by")
            print_evaluation(console, metrics, by_group, group_by=group_by, title=f"held out, {when} training")
            return


def print_evaluation(
    console: Console, metrics: Mapping[str, Any], by_group: Mapping[str, Any], *, group_by: str | None, title: str
) -> None:
    """Print a row for each value of `group_by` and one for all prompts."""
    at_k = [name for name in metrics if PASS_OR_MEAN_AT_K.fullmatch(name)]
    names = [name for name in (*_FIRST, *at_k, *_LAST) if name in metrics]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(plain(group_by or ""), no_wrap=True)
    for name in names:
        table.add_column(_NAMES.get(name, name), justify="right", no_wrap=True)
    for group, values in (*by_group.items(), ("all prompts", metrics)):
        numbers = (_shown(name, values.get(name)) for name in names)
        table.add_row(Text(clipped(plain(group), _MAX_NAME)), *numbers)
    console.print(Text(plain(title), style="bold"))
    console.print(table)


def _shown(name: str, value: Any) -> str:
    if finite(value) is None:
        return ""
    return f"{value:.0f}" if name in _WHOLE else f"{value:.1f}" if name == "mean_length" else f"{value:.3f}"
