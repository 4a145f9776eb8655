"""The numbers of an evaluation as a table for the terminal, 80 columns wide at most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_async.processes.wording import plain

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
_MOST_COLUMNS = 5
_LONGEST_NAME = 18
ALL = "all"


def print_evaluation(
    console: Console, metrics: Mapping[str, Any], by_group: Mapping[str, Any], *, group_by: str | None, title: str
) -> None:
    """Every number of everything and of each value of `group_by`, in a column; with more than a handful of values a row for each,
    and of the numbers the most important."""
    parts = {str(group): values for group, values in by_group.items() if isinstance(values, Mapping)}
    columns = {**parts, ALL: metrics}
    names = [name for name in _order(metrics) if name in metrics]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(plain(group_by or ""), no_wrap=True)
    if len(columns) <= _MOST_COLUMNS:
        for column in columns:
            table.add_column(Text(_short(column)), justify="right", overflow="fold")
        for name in names:
            table.add_row(_NAMES.get(name, name), *(_number(name, values.get(name)) for values in columns.values()))
    else:
        names = _important(names)
        for name in names:
            table.add_column(_NAMES.get(name, name), justify="right", no_wrap=True)
        for column, values in columns.items():
            table.add_row(Text(_short(column)), *(_number(name, values.get(name)) for name in names))
    console.print(Text(plain(title), style="bold"))
    console.print(table)


def _order(metrics: Mapping[str, Any]) -> list[str]:
    return [*_FIRST, *(name for name in metrics if name.partition("@")[0] in ("pass", "mean", "majority")), *_LAST]


def _important(names: Sequence[str]) -> list[str]:
    """Rewards and lengths, and of pass@k and majority@k those with the largest k."""
    largest = {name.partition("@")[0]: name for name in names if "@" in name}
    wanted = (*_FIRST, largest.get("pass"), largest.get("majority"), "mean_length")
    return [name for name in names if name in wanted]


def _short(name: str) -> str:
    text = plain(name)
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 3] + "..."


def _number(name: str, value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return f"{value:.0f}" if name in _WHOLE else f"{value:.1f}" if name == "mean_length" else f"{value:.3f}"
