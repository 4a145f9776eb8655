"""What `grpo-async eval` evaluates: the model that the configuration names, one that a run made, or what runs already."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTarget:
    """`label` names the results. Exactly one: `folder`, a Hugging Face folder; `run` and `step`, a checkpoint that is to be turned
    into one; or none of them: running servers, as they serve."""

    label: str
    folder: str | None = None
    run: RunDir | None = None
    step: int | None = None


def choose_target(config: ExperimentConfig, *, checkpoint: str | None, run: Path | None) -> EvaluationTarget:
    """Decide; looks at the names of files only.

    Args:
        checkpoint: a step of the run, "latest" (its newest checkpoint), a Hugging Face folder, or a folder step_N.
        run: the run's directory; None: that of `config`. With it and without `checkpoint`: the model that the run exported at its
            end, else its newest checkpoint.

    Raises:
        ConfigError: there is no such thing, or running servers are named beside it.
    """
    if checkpoint is None and run is None:
        if config.inference.urls:
            return EvaluationTarget(label="served")
        return EvaluationTarget(label="base", folder=config.model.path)
    if config.inference.urls:
        raise ConfigError(
            "inference.urls names servers that run already and serve what they serve; leave out --checkpoint and --run, or start "
            "servers of its own with --set inference.urls=[]"
        )
    run_dir = RunDir(config.run_path if run is None else run)
    if run is not None and not run.is_dir():
        raise ConfigError(f"--run {run}: there is no such directory")
    if checkpoint is None:
        if (run_dir.model / "config.json").is_file():
            return EvaluationTarget(label="model", folder=str(run_dir.model))
        return _newest(run_dir, f"--run {run}")
    if checkpoint == "latest":
        return _newest(run_dir, "--checkpoint latest")
    if checkpoint.isdecimal():
        return _of_step(run_dir, int(checkpoint))
    return _of_path(Path(checkpoint))


def _newest(run_dir: RunDir, asked: str) -> EvaluationTarget:
    steps = run_dir.checkpoint_steps()
    if not steps:
        raise ConfigError(f"{asked}: {run_dir.checkpoints} has no checkpoint; name another run with --run DIR")
    return EvaluationTarget(label=f"step_{steps[-1]}", run=run_dir, step=steps[-1])


def _of_step(run_dir: RunDir, step: int) -> EvaluationTarget:
    steps = run_dir.checkpoint_steps()
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"--checkpoint {step}: {run_dir.checkpoints} has no such step; there are: {known}")
    return EvaluationTarget(label=f"step_{step}", run=run_dir, step=step)


def _of_path(path: Path) -> EvaluationTarget:
    if (path / "config.json").is_file():
        label = "model" if path.name == "model" else re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name)
        return EvaluationTarget(label=label, folder=str(path))
    run_dir = RunDir(path.resolve().parent.parent)
    for step in run_dir.checkpoint_steps():
        if run_dir.checkpoint(step) == path.resolve():
            return EvaluationTarget(label=f"step_{step}", run=run_dir, step=step)
    raise ConfigError(
        f"--checkpoint {path}: neither a step, `latest`, a Hugging Face folder (with a config.json), nor a folder "
        "RUN/checkpoints/step_N"
    )
