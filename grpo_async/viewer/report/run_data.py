"""Reads what a run directory holds, as far as it is there: a run that is running, was killed or is old has less of it.

Nothing here raises because of what a file contains: what cannot be read is a sentence in `problems`, and the rest is used. Of the
configuration only what may be shown is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_async.config.diff import Difference, differences
from grpo_async.config.loader import read_values
from grpo_async.config.public import public_sections
from grpo_async.findings import Evidence, MetricRow
from grpo_async.findings.evidence import read_metrics
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import read_evaluations
from grpo_async.utils.files import read_object
from grpo_async.utils.run_state import state_of
from grpo_async.viewer.report.rollouts import RolloutOverview, read_rollouts

_NUMBERS_ONLY = ("inference", "launch")  # addresses, accounts and options of a machine stay out
_PLAIN_WORDS = {"engine", "dtype", "device", "sharding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData(Evidence):
    """One run: what the findings are made of, and what the report shows with it. `config` is the part that may be shown, empty
    where it cannot be read."""

    label: str  # unique among the runs of a report
    run_dir: RunDir
    engine: str | None = None  # the one that was chosen; None: not known
    on_gpu: bool | None = None  # whether the trainer had a GPU; None: not known
    num_gpus: int | None = None  # of the machine with the servers; None: not known
    summary: Mapping[str, Any] = field(default_factory=dict)
    rollouts: RolloutOverview = field(default_factory=RolloutOverview)

    @property
    def max_steps(self) -> int | None:
        """training.max_steps; None: not known."""
        value = self.setting("training.max_steps")
        return value if isinstance(value, int) else None

    @property
    def last_step(self) -> int:
        """The last optimizer step that metrics.jsonl has; 0: none."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_run(
    run_dir: RunDir, label: str, *, metrics: Sequence[MetricRow] | None = None, rollouts: RolloutOverview | None = None
) -> RunData:
    """Everything of one run that the report shows. `metrics`, `rollouts`: where they are known already, or not wanted."""
    problems: list[str] = []
    summary, status = read_object(run_dir.summary, problems), read_object(run_dir.status, problems)
    metrics = read_metrics(run_dir, problems) if metrics is None else metrics
    if not metrics:
        problems.append("There are no metrics: no optimizer step was finished.")
    rollouts = read_rollouts(run_dir) if rollouts is None else rollouts
    error = status.get("error")

    def known(name: str, kind: type) -> Any:
        """A value of the last attempt, else of the summary, which may be older."""
        return next((value for each in (status, summary) if isinstance(value := each.get(name), kind)), None)

    return RunData(
        label=label,
        run_dir=run_dir,
        status=state_of(status, summary).state,
        error=error if isinstance(error, str) else None,
        engine=known("engine", str),
        on_gpu=known("on_gpu", bool),
        num_gpus=num_gpus if isinstance(num_gpus := status.get("num_gpus"), int) else None,
        summary=summary,
        config=shown_config(read_values(run_dir.config, problems)),
        metrics=metrics,
        evaluations=list(read_evaluations(run_dir.evaluation_log, problems)),
        num_sampled=rollouts.num_sampled,
        num_unscored=rollouts.num_unscored,
        errors=rollouts.errors,
        rollouts=rollouts,
        problems=[*problems, *rollouts.notes],
    )


def labels_of(run_dirs: Sequence[RunDir]) -> list[str]:
    """A short name for each folder, all different: [runs/a, runs/b] -> ["a", "b"]; [x/a, y/a] -> ["x/a", "y/a"]."""
    paths = [run_dir.root.resolve() for run_dir in run_dirs]
    num_parts = 1
    while len({path.parts[-num_parts:] for path in paths}) < len(set(paths)):
        num_parts += 1
    return ["/".join(path.parts[-num_parts:]) for path in paths]


def shown_config(sections: Mapping[str, Any]) -> dict[str, Any]:
    """What a report may show: `config.public`, and of `inference` and `launch` the numbers, switches and a few plain words.

    {"inference": {"replicas": 2, "host": "10.0.0.1", "vllm": {"kv_cache_mb": 512}}} ->
    {"inference": {"replicas": 2, "vllm": {"kv_cache_mb": 512}}}
    """
    shown = public_sections(sections)
    for name in _NUMBERS_ONLY:
        section = sections.get(name)
        if isinstance(section, Mapping) and (plain := _plain(section)):
            shown[name] = plain
    return shown


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            if below := _plain(value):
                kept[key] = below
        elif isinstance(value, bool | int | float) or (key in _PLAIN_WORDS and isinstance(value, str)):
            kept[key] = value
    return kept


def changed_settings(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Settings that differ between the runs, but for their names and folders, which always do."""
    return [each for each in differences(configs) if each.path not in ("run.name", "run.dir")]
