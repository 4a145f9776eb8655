"""What `grpo-async eval` evaluates: the model that the configuration names, or one that a run made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.training.checkpoint_manifest import find_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTarget:
    """`label` names the results. Either `folder` is set, a Hugging Face folder or hub name; or `run` and `step`, a checkpoint
    to convert to one."""

    label: str
    folder: str | None = None
    run: RunDir | None = None
    step: int | None = None


def choose_target(config: ExperimentConfig, checkpoint: str | None) -> EvaluationTarget:
    """Choose the target, by looking at file names only. `checkpoint`: one of the run of `config`, as `find_checkpoint` takes it; a
    Hugging Face folder; the path of another run's checkpoint; None: the model that `config` names. Raises ConfigError."""
    if checkpoint is None:
        return EvaluationTarget(label="base", folder=config.model.path)
    path = Path(checkpoint).resolve()
    if checkpoint in ("latest", "best") or checkpoint.isdecimal() or not path.is_dir():
        return _from_run(RunDir(config.run_path), checkpoint)
    if (path / "config.json").is_file():
        return EvaluationTarget(label=re.sub(r"[^A-Za-z0-9._-]+", "-", path.name), folder=checkpoint)
    if (run_dir := RunDir(path.parent.parent)).checkpoints == path.parent:
        return _from_run(run_dir, checkpoint)
    raise ConfigError(
        f"--checkpoint {checkpoint}: neither a Hugging Face folder (with a config.json) nor a folder RUN/checkpoints/step_N"
    )


def _from_run(run_dir: RunDir, checkpoint: str) -> EvaluationTarget:
    step = find_checkpoint(run_dir, checkpoint, option="--checkpoint")
    return EvaluationTarget(label=run_dir.checkpoint(step).name, run=run_dir, step=step)
