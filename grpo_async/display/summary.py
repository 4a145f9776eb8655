"""What a run reached, and the numbers of an evaluation: tables for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_async.display.render import PASS_OR_MEAN_AT_K, diagnosis_rows
from grpo_async.findings import RunHistory, diagnose
from grpo_async.run_directory import RunDir
from grpo_async.utils.console import print_rows
from grpo_async.utils.run_state import STOPPED
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import clipped, count, finite
from grpo_async.viewer.facts import facts_of, summary_of

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


def print_summary(console: Console, run: RunHistory, run_dir: Path, *, report: Path | None = None) -> None:
    """Print the table and what to do next. `report`: the page, if one is written."""
    summary = summary_of(run)
    rows = [
        *((name, text) for name, text, _ in diagnosis_rows(diagnose(run).as_dict())),
        ("run", f"{run.status} after {count(run.last_step, 'step')}"),
        *fact_rows(run),
        ("directory", str(run_dir)),
        ("model", str(summary.get("model") or "")),
    ]
    print_rows(console, [(name, Text(plain(value))) for name, value in rows if value])
    results = run.evaluated()
    if results and (results[-1].by_group or "pass@2" in results[-1].metrics):  # it says more than the line above
        last, group_by = results[-1], run.setting("evaluation.group_by")
        title = f"held out, {last.label if last.when == 'during' else f'{last.when} training'}"
        console.print()
        print_evaluation(console, last.metrics, last.by_group, group_by=group_by, title=title)
    console.print(Text("\nnext:"))
    for command in _next_commands(run, run_dir, report):
        console.print(Text(f"  {command}"), soft_wrap=True)


def fact_rows(run: RunHistory) -> list[tuple[str, str]]:
    """Names and texts of what a run reached."""
    return [(name, f"{value} ({note})" if note else value) for name, value, note in facts_of(run)]


def _next_commands(run: RunHistory, run_dir: Path, report: Path | None) -> Iterator[str]:
    if report is not None:
        yield f"{report}    # open it in a browser: does it learn, and why not"
    yield f"grpo-async inspect-rollouts {shlex.quote(str(run_dir))}    # read what was generated, and its rewards"
    if run.status == STOPPED:
        # it has a model when only the last evaluation is left
        what = "make the evaluation after training" if summary_of(run).get("model") else "continue from the checkpoint"
        yield f"grpo-async train {shlex.quote(str(RunDir(run_dir).config))} --resume latest    # {what}"


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
