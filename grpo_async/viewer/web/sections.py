"""What the page of a run says beside its curves: diagnosis, findings, evaluations."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_async.findings import Diagnosis, Finding, Severity, diagnose, find
from grpo_async.utils.text import format_number
from grpo_async.viewer.web.run_data import RunData

LEVELS = {Severity.ERROR: "bad", Severity.WARNING: "warning", Severity.NOTE: "info"}
_DIAGNOSIS_LEVELS = {True: "good", False: "bad", None: "info"}

_LESS_IMPORTANT = ("version_min", "version_max", "mixed", "reward_std", "num_turns", "duration_s")


def inspect_command(run: RunData, query: str, sort: str | None = None) -> str:
    """The line to paste into a shell, from the folder of this process. `sort`: a field, "-" before it for the highest first."""
    words = ["grpo-async", "inspect-rollouts", str(run.run_dir.root), query]
    order = None if sort is None else sort.removeprefix("-") if sort.startswith("-") else f"{sort}:asc"
    return shlex.join([*words, *(["--sort", order] if order else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Whether a run learns, and the findings, the worst first. `level` gives the diagnosis its color."""

    diagnosis: Diagnosis
    level: str
    findings: Sequence[Finding]

    @property
    def text(self) -> str:
        """Its two sentences, one below the other."""
        return "\n".join(self.diagnosis.lines)


def learning(run: RunData) -> Learning:
    diagnosis = diagnose(run)
    return Learning(diagnosis=diagnosis, level=_DIAGNOSIS_LEVELS[diagnosis.is_learning], findings=find(run))


# -- evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; the first cell names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def evaluation_tables(run: RunData) -> Iterator[Table]:
    """Every evaluation of a run, and the newest one by value of `evaluation.group_by`."""
    if not run.evaluations:
        return
    names = _evaluation_names(run)
    head = ["", *(name.replace("_", " ") for name in names)]
    rows = []
    for each in run.evaluations:
        when = "" if each.when == "during" else f", {each.when} training"
        values = _values(each.metrics, names)
        if each.why_not:
            values = [f"none: {each.why_not}", *[""] * (len(names) - 1)]
        rows.append([f"step {each.step}{when}", *values])
    yield Table(caption="Evaluations", head=head, rows=rows)
    newest = next((each for each in reversed(run.evaluations) if each.by_group), None)
    if newest is not None:
        parts = [*newest.by_group.items(), ("all prompts", newest.metrics)]
        rows = [[part, *_values(values, names)] for part, values in parts]
        yield Table(caption=f"By value of evaluation.group_by, at step {newest.step}", head=head, rows=rows)


def _evaluation_names(run: RunData) -> list[str]:
    names = list(dict.fromkeys(name for each in run.evaluations for name in each.metrics))
    first = [name for name in ("reward", "reward_stderr", "num_prompts") if name in names]
    return [*first, *(name for name in names if name not in first and name not in _LESS_IMPORTANT)] or ["reward"]


def _values(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """The value of each name; "" where there is none."""
    return [format_number(metrics[name]) if name in metrics else "" for name in names]
