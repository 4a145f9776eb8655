"""Small run directories: metrics, evaluations, a store, a status, as the launcher and the trainer leave them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_async.run_directory import RunDir
from tests.launch.support import make_config
from tests.store.builders import append_simple
from tests.support.stored import LineStore

NORMAL: dict[str, float] = {
    "reward_std": 0.3,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "frac_reward_zero_std": 0.1,
    "completions/clipped_ratio": 0.0,
    "completions/mean_length": 40.0,
    "entropy": 0.8,
    "grad_norm": 0.5,
    "lr": 1e-5,
    "sampling/importance_sampling_ratio/mean": 1.0,
    "sampling/importance_sampling_ratio/min": 0.6,
    "sampling/importance_sampling_ratio/max": 1.5,
    "sampling/sampling_logp_difference/mean": 0.01,
    "sampling/ess": 0.99,
    "async/staleness_mean": 1.0,
    "async/staleness_max": 1.0,
    "async/staleness/0": 0.25,
    "async/staleness/1": 0.75,
    "clip_ratio/region_mean": 0.01,
    "step_time": 2.0,
    "num_tokens": 400.0,
    "pipeline/trainer_idle_ratio": 0.25,
    "pipeline/generator_idle_ratio": 0.5,
    "pipeline/training_fraction": 0.6,
    "perf/generated_tokens_per_s": 1000.0,
    "perf/trained_tokens_per_s": 800.0,
    "ledger/groups/started": 100.0,
    "ledger/groups/trained": 90.0,
    "ledger/groups/filtered": 10.0,
}
"""A step of a run that does well."""


def wiggle(step: int) -> float:
    """A little noise that is the same each time."""
    return 0.02 * math.sin(12.9898 * step)


def steps(num_steps: int, *, first: float = 0.2, last: float = 0.8, **changes: float) -> list[dict[str, float]]:
    """Metrics whose reward goes straight from `first` to `last`; `changes` replace other metrics ("/" is written "__")."""
    changed = {name.replace("__", "/"): value for name, value in changes.items()}
    rows = []
    for step in range(1, num_steps + 1):
        done = (step - 1) / max(1, num_steps - 1)
        reward = first + (last - first) * done + (wiggle(step) if first != last else 0.0)
        rows.append({"step": float(step), **NORMAL, "reward": reward, **changed})
    return rows


def evaluation(step: int, reward: float, **more: float) -> dict[str, Any]:
    """`more` metrics."""
    metrics = {
        "num_prompts": 100.0,
        "reward": reward,
        "reward_stderr": 0.02,
        "pass@1": reward,
        "mean_length": 30.0,
        **more,
    }
    return {"step": step, "when": "before" if step == 0 else "during", "metrics": metrics, "by_group": {}}


def write_run(
    folder: Path,
    name: str = "run",
    *,
    metrics: Sequence[Mapping[str, float]] = (),
    evaluations: Sequence[Mapping[str, Any]] = (),
    groups: Sequence[Mapping[str, Any]] = (),
    state: str | None = "finished",
    error: str | None = None,
    summary: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunDir:
    """A run directory below `folder`/runs, with groups 0, 1, ..., as `append_simple` takes them."""
    from grpo_async.config.loader import dump_config

    run_dir = RunDir(folder / "runs" / name)
    run_dir.create()
    changes = {"run": {"name": name}, "training": {"max_steps": len(metrics) or 5}, **(config or {})}
    run_dir.config.write_text(dump_config(make_config(folder, **changes)))
    if metrics:
        run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if evaluations:
        run_dir.evaluation_log.write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    if groups:
        with LineStore(run_dir.rollouts) as store:
            for number, each in enumerate(groups):
                append_simple(store, number, **each)
    if state is not None:
        run_dir.status.write_text(json.dumps({"version": 1, "state": state, "error": error}))
    if summary is not None:
        run_dir.summary.write_text(json.dumps(summary))
    return run_dir


def answers_of(report: Path) -> list[tuple[str, dict[str, Any], Any, str]]:
    """What a report has inside: views, what they are asked with, their answers, and where there is none, why."""
    page = report.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert found
    return [tuple(each) for each in json.loads(found[1])["answers"]]


def answers_by_view(report: Path) -> dict[str, Any]:
    """The first answer of each view in the report of one run."""
    return {view: answer for view, _, answer, _ in reversed(answers_of(report))}
