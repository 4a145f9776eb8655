"""Reads what a run directory holds, as far as it is there: a run that is running, was killed or is old has less of it.

Nothing here raises because of what a file contains: what cannot be read is a sentence in `problems`, and the rest is used. Of the
configuration only what may be shown is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from grpo_async.config.diff import Difference, differences
from grpo_async.config.public import shown_config
from grpo_async.findings import MetricRow, RunHistory
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData(RunHistory):
    """One run: what the findings are made of, and what the page shows with it. `config` is the part that may be shown, empty
    where it cannot be read. `num_rollouts`, `num_groups`: in the store, if it was read."""

    label: str  # unique among the runs of a page
    run_dir: RunDir
    summary: Mapping[str, Any] = field(default_factory=dict)
    num_rollouts: int = 0
    num_groups: int = 0

    @property
    def max_steps(self) -> int | None:
        """training.max_steps; None: not known."""
        value = self.setting("training.max_steps")
        return value if isinstance(value, int) else None

    @property
    def last_step(self) -> int:
        """The last optimizer step that metrics.jsonl has; 0: none."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_run(run_dir: RunDir, label: str, *, metrics: Sequence[MetricRow] | None = None) -> RunData:
    """Everything of one run that its page shows, without its store. `metrics`: where they are known already."""
    history = RunHistory.read(run_dir, metrics)
    summary = read_object(run_dir.summary, [])
    no_metrics = (
        []
        if history.metrics or history.evaluation_result
        else ["There are no metrics: no optimizer step was finished."]
    )
    shown: dict[str, Any] = {
        "config": shown_config(history.config),
        "problems": [*history.problems, *no_metrics],
    }
    return RunData(
        label=label,
        run_dir=run_dir,
        summary=summary,
        **{each.name: getattr(history, each.name) for each in fields(history)} | shown,
    )


def labels_of(run_dirs: Sequence[RunDir]) -> list[str]:
    """A short name for each folder, all different: [runs/a, runs/b] -> ["a", "b"]; [x/a, y/a] -> ["x/a", "y/a"]."""
    paths = [run_dir.root.resolve() for run_dir in run_dirs]
    num_parts = 1
    while len({path.parts[-num_parts:] for path in paths}) < len(set(paths)):
        num_parts += 1
    return ["/".join(path.parts[-num_parts:]) for path in paths]


def changed_settings(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Settings that differ between the runs, but for their names and folders, which always do."""
    return [each for each in differences(configs) if each.path not in ("run.name", "run.dir")]
