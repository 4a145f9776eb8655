"""What the findings of a run are made of: its metrics, evaluations, counts of its rollouts and its settings.

`Evidence.read` takes them from the files of a run directory, also while the run writes them. Nothing raises because of what a file
contains: what cannot be read is left out.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Self

from grpo_async.config.loader import read_values
from grpo_async.findings.statistics import Change, held_out_change, trend
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import EvaluationRecord, read_evaluations
from grpo_async.utils.files import GrowingFile, numbers, parse_object, read_object, read_objects
from grpo_async.utils.run_state import FINISHED, state_of

_MIN_WINDOW, _MAX_WINDOW = 3, 50

MetricRow = Mapping[str, float]
"""One line of metrics.jsonl: values that are numbers and finite; "step" is always there."""


class PackedRow(MetricRow):
    """A row in 8 bytes a value: a dict takes twenty times as much, and a long run has many."""

    __slots__ = ("_columns", "_values")

    def __init__(self, row: MetricRow, known: dict[tuple[str, ...], dict[str, int]]) -> None:
        """`known`: the names of rows that were packed before, which this one shares where it has the same."""
        names = tuple(row)
        self._columns = known.setdefault(names, {name: column for column, name in enumerate(names)})
        self._values = array("d", row.values())

    def __getitem__(self, name: str) -> float:
        return self._values[self._columns[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One run's metrics and evaluations, each ascending by step.

    Args:
        num_sampled, num_unscored, errors: from the rollout store, if it was read: the number of rollouts that did not fail and
            have a token in some step, how many of them have no reward, and (message, count) of failures, the most frequent first.
        status: one of run_state.LEVELS. error: why the run failed.
        problems: a sentence about each file that could not be read, or only in part.
    """

    metrics: Sequence[MetricRow] = ()
    evaluations: Sequence[EvaluationRecord] = ()
    num_sampled: int = 0
    num_unscored: int = 0
    errors: Sequence[tuple[str, int]] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    status: str = FINISHED
    error: str | None = None
    problems: Sequence[str] = ()

    @classmethod
    def read(cls, run_dir: RunDir, metrics: Sequence[MetricRow] | None = None) -> Self:
        """The evidence in a run's files, without the rollout store. `metrics`: if they were read already; that takes time for a
        long run."""
        problems: list[str] = []
        status, summary = read_object(run_dir.status, problems), read_object(run_dir.summary, problems)
        error = status.get("error")
        return cls(
            metrics=read_metrics(run_dir, problems) if metrics is None else metrics,
            evaluations=sorted(read_evaluations(run_dir.evaluation_log, problems), key=lambda each: each.step),
            config=read_values(run_dir.config, problems),
            status=state_of(status, summary).state,
            error=error if isinstance(error, str) else None,
            problems=problems,
        )

    @property
    def num_steps(self) -> int:
        return len(self.metrics)

    def values(self, name: str) -> list[float]:
        """Values of metric `name`, for the steps that have it."""
        return [row[name] for row in self.metrics if name in row]

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """Names of metrics that begin with `prefix` and end with `suffix`, of all steps, sorted."""
        names: set[str] = set().union(*self.metrics)
        return sorted(name for name in names if name.startswith(prefix) and name.endswith(suffix))

    def trend(self, name: str) -> Change | None:
        """How a metric moved over the steps; see `statistics.trend`."""
        return trend(self.values(name))

    @property
    def has_risen(self) -> bool:
        """Whether the sampled reward has risen by more than chance."""
        moved = self.trend("reward")
        return moved is not None and moved.has_risen

    def ends(self, name: str) -> tuple[float, float] | None:
        """The means of the first and of the last tenth of the steps (at least 3, at most 50); None with fewer than 6 values."""
        values = self.values(name)
        size = min(max(_MIN_WINDOW, len(values) // 10), _MAX_WINDOW)
        return (fmean(values[:size]), fmean(values[-size:])) if len(values) >= 2 * size else None

    def recent(self, name: str) -> float | None:
        """The mean of the last third of the values; None without any."""
        values = self.values(name)
        return fmean(values[-max(1, len(values) // 3) :]) if values else None

    def last(self, name: str) -> float | None:
        values = self.values(name)
        return values[-1] if values else None

    @property
    def top(self) -> float | None:
        """The highest reward that any rollout got, where that is recorded; else the highest mean of a step."""
        return max(self.values("reward_max") or self.values("reward"), default=None)

    @property
    def reward_range(self) -> float:
        """Difference between the highest and the lowest reward of any rollout, the scale of changes. 1 where it is not
        known, or all rewards are equal."""
        found = [value for name in ("reward_min", "reward", "reward_max") for value in self.values(name)]
        found += [value for each in self.evaluated() for value in each.prompt_rewards if value is not None]
        return (max(found) - min(found) if found else 0.0) or 1.0

    def setting(self, path: str) -> object:
        """A setting of the configuration, by its dotted path; None: not there, or not shown."""
        value: object = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def evaluated(self) -> list[EvaluationRecord]:
        """Evaluations with a reward."""
        return [each for each in self.evaluations if "reward" in each.metrics]

    def held_out(self) -> Change | None:
        """The change of the held-out reward between the first evaluation and the last; None with fewer than two."""
        results = self.evaluated()
        return None if len(results) < 2 else self.between(results[0], results[-1])

    def between(self, first: EvaluationRecord, last: EvaluationRecord) -> Change:
        return held_out_change(
            first.metrics, last.metrics, first.prompt_rewards, last.prompt_rewards, scale=self.reward_range
        )


def read_metrics(run_dir: RunDir, problems: list[str]) -> list[MetricRow]:
    """The whole of metrics.jsonl, ascending by step."""
    rows: dict[int, MetricRow] = {}
    known: dict[tuple[str, ...], dict[str, int]] = {}
    for line in read_objects(run_dir.metrics, problems):
        _add(rows, line, known)
    return list(rows.values())


def _add(rows: dict[int, MetricRow], line: object, known: dict[tuple[str, ...], dict[str, int]]) -> None:
    """Add a line of metrics.jsonl. It replaces its own step and all later ones: the run was resumed from an earlier checkpoint."""
    row = numbers(line)
    if "step" not in row:
        return
    step = int(row["step"])
    while rows and next(reversed(rows)) >= step:
        rows.popitem()
    rows[step] = PackedRow(row, known)


class MetricsReader:
    """metrics.jsonl, also while it grows. Safe in several threads."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, MetricRow] = {}
        self._known: dict[tuple[str, ...], dict[str, int]] = {}
        self._file = GrowingFile(path, self._rows.clear)
        self.problem: str | None = None
        """Why the last look failed; None: it did not."""

    def rows(self) -> dict[int, MetricRow]:
        """The finite numbers of each step, ascending by step. While the file cannot be read: those that were read before."""
        with self._lock:
            self.problem = None
            try:
                for _, line in self._file.new_lines():
                    _add(self._rows, parse_object(line), self._known)
            except OSError as error:  # a network file system that fails for a while
                self.problem = f"metrics.jsonl cannot be read: {error}"
            return dict(self._rows)
