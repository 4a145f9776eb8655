"""What a run's files say of its past: metrics, evaluations, settings, state.

`RunHistory.read` takes them from a run directory, also while the run writes them. What cannot be
read is left out, and named in `problems`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

from grpo_async.config.loader import read_values
from grpo_async.findings.statistics import Change, held_out_change, trend
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import EvaluationRecord, read_evaluations
from grpo_async.utils.files import numbers, read_object, read_objects
from grpo_async.utils.run_state import FINISHED, state_of

MetricRow = Mapping[str, float]
"""One line of metrics.jsonl: values that are numbers and finite; "step" is always there."""


class PackedRow(MetricRow):
    """A row in 8 bytes a value: a dict takes twenty times as much, and a long run has many."""

    __slots__ = ("_columns", "_values")

    def __init__(self, row: MetricRow, known: dict[tuple[str, ...], dict[str, int]]) -> None:
        """`known`: the names of rows that were packed before; equal names are shared."""
        names = tuple(row)
        columns = {name: column for column, name in enumerate(names)}
        self._columns = known.setdefault(names, columns)
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
class RunHistory:
    """One run's metrics and evaluations, each ascending by step.

    Args:
        evaluation_result: content of evaluation.json, which `eval` writes in place of a training.
        purpose: train, or evaluation for a run of `eval`.
        status: one of run_state.LEVELS. error: why the run failed.
        problems: a sentence about each file that could not be read, or only in part.
    """

    metrics: Sequence[MetricRow] = ()
    evaluations: Sequence[EvaluationRecord] = ()
    evaluation_result: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    engine: str | None = None
    purpose: str = "train"
    status: str = FINISHED
    error: str | None = None
    problems: Sequence[str] = ()

    @classmethod
    def read(cls, run_dir: RunDir, metrics: Sequence[MetricRow] | None = None) -> Self:
        """Read the files of a run. `metrics`: if they were read already."""
        problems: list[str] = []
        status = read_object(run_dir.status, problems)
        summary = read_object(run_dir.summary, problems)
        evaluations = read_evaluations(run_dir.evaluation_log, problems)
        error, engine = (status.get(name) or summary.get(name) for name in ("error", "engine"))
        return cls(
            metrics=read_metrics(run_dir, problems) if metrics is None else metrics,
            evaluations=sorted(evaluations, key=lambda record: record.step),
            evaluation_result=read_object(run_dir.evaluation_result, problems),
            config=read_values(run_dir.config, problems),
            summary=summary,
            engine=engine if isinstance(engine, str) else None,
            purpose=str(status.get("purpose", "train")),
            status=state_of(status, summary).state,
            error=error if isinstance(error, str) else None,
            problems=problems,
        )

    @property
    def num_steps(self) -> int:
        return len(self.metrics)

    @property
    def last_step(self) -> int:
        """The last optimizer step that metrics.jsonl has; 0: none."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def max_steps(self) -> int | None:
        """training.max_steps; None: not known."""
        value = self.setting("training.max_steps")
        return value if isinstance(value, int) else None

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, for the steps that have it."""
        return [row[name] for row in self.metrics if name in row]

    def names(self, prefix: str) -> list[str]:
        """Return the names of metrics that begin with `prefix`, sorted."""
        return sorted({name for row in self.metrics for name in row if name.startswith(prefix)})

    def recent(self, name: str) -> float | None:
        """Return the mean of the last third of a metric's values; None without any."""
        values = self.values(name)
        return fmean(values[-max(1, len(values) // 3) :]) if values else None

    def last(self, name: str) -> float | None:
        values = self.values(name)
        return values[-1] if values else None

    def trend(self, name: str) -> Change | None:
        """Return how a metric moved over the steps; see `statistics.trend`."""
        return trend(self.values(name))

    @property
    def has_risen(self) -> bool:
        """Whether the sampled reward has risen by more than chance."""
        moved = self.trend("reward")
        return moved is not None and moved.has_risen

    @property
    def reward_range(self) -> float:
        """Difference between the highest and the lowest reward of any rollout, the scale of changes.
        1 where it is not known, or all rewards are equal."""
        rewards = [v for name in ("reward_min", "reward", "reward_max") for v in self.values(name)]
        for record in self.evaluated():
            rewards += [reward for reward in record.prompt_rewards if reward is not None]
        return (max(rewards) - min(rewards) if rewards else 0.0) or 1.0

    def setting(self, path: str) -> Any:
        """Return a setting by its dotted path; None: it is not there, or not shown."""
        value: object = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def evaluated(self) -> list[EvaluationRecord]:
        """Return the evaluations with a reward."""
        return [record for record in self.evaluations if "reward" in record.metrics]

    def held_out(self) -> Change | None:
        """Return the change of the held-out reward from the first evaluation to the last; None with
        fewer than two."""
        results = self.evaluated()
        return None if len(results) < 2 else self.between(results[0], results[-1])

    def between(self, first: EvaluationRecord, last: EvaluationRecord) -> Change:
        return held_out_change(
            first.metrics,
            last.metrics,
            first.prompt_rewards,
            last.prompt_rewards,
            scale=self.reward_range,
        )


def read_metrics(run_dir: RunDir, problems: list[str]) -> list[MetricRow]:
    """Return the whole of metrics.jsonl, ascending by step.

    A line replaces that of its own step and of all later ones: the run was resumed from an earlier checkpoint.
    """
    rows: dict[int, MetricRow] = {}
    known: dict[tuple[str, ...], dict[str, int]] = {}
    for line in read_objects(run_dir.metrics, problems):
        row = numbers(line)
        if "step" in row:
            step = int(row["step"])
            while rows and next(reversed(rows)) >= step:
                rows.popitem()
            rows[step] = PackedRow(row, known)
    return list(rows.values())
