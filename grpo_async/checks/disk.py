"""Whether a run can be written where `run.dir` says: permissions, and room for checkpoints and the exported model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpo_async.checks.memory import ITEM_BYTES, ModelSize
from grpo_async.checks.report import Found
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.utils.text import format_bytes

_TIGHT = 0.9  # of what is free


def check_run_place(run_dir: RunDir) -> None:
    """The run directory, or the nearest folder above it that exists, can be written to.

    Raises:
        ConfigError: it cannot.
    """
    try:
        place = _nearest(run_dir)
        fault = "" if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else "is not a folder you can write to"
    except OSError as error:
        place, fault = run_dir.root, str(error.strerror)
    if fault:
        raise ConfigError(
            f"run.dir: {run_dir.root} cannot be created: {place} {fault}; set run.dir to a folder that you own"
        )


def _nearest(run_dir: RunDir) -> Path:
    return next(path for path in (run_dir.root, *run_dir.root.absolute().parents) if path.exists())


def disk_room(config: ExperimentConfig, run_dir: RunDir, size: ModelSize) -> Found:
    """The run directory's disk holds the checkpoints and the exported model.

    A checkpoint holds the T parameters that are trained and AdamW's two moments: 3 T m bytes. `checkpoint.keep_last` of them stay,
    one more is there while it is written; what is there already (a resume) counts. The export is N m.
    """
    item = ITEM_BYTES[config.model.dtype]
    model, each = size.parameters * item, 3 * size.trained(config) * (item if config.model.lora is None else 4)
    still = max(0, config.checkpoint.keep_last + 1 - len(run_dir.checkpoint_steps()))
    needed, free = still * each + model, shutil.disk_usage(_nearest(run_dir)).free
    parts = f"{still} checkpoint(s) of {format_bytes(each)} and the model of {format_bytes(model)}"
    message = f"{parts} need {format_bytes(needed)}; {run_dir.root} has {format_bytes(free)} free"
    advice = "free space, lower checkpoint.keep_last, or set run.dir to another disk"
    if needed > free:
        return "fail", f"{message}: not enough; {advice}"
    if needed > _TIGHT * free:
        return "warn", f"{message}, and rollouts are written too; {advice}"
    return "pass", message
