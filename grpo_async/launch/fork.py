"""`grpo-async train --fork RUN@STEP`: a new run that begins at another run's checkpoint, with its weights, optimizer, queue,
unfinished conversations, prompts and seeds. Runs that are forked from one step differ in their settings and in nothing else.

The new run directory holds the checkpoint (hard links, where the file system has them), the metrics and evaluations up to it, the
parent's config.yaml, and fork.json; then it is resumed. What may not change at a resume may not change here either.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from grpo_async.config.loader import load_config
from grpo_async.display.output import Output
from grpo_async.errors import ConfigError
from grpo_async.launch.prepare import writing
from grpo_async.launch.start import launch
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.training.checkpoint_manifest import find_checkpoint
from grpo_async.viewer.runs import find_run


def run_fork(
    parent_and_step: str,
    config: Path | None,
    overrides: Sequence[str] = (),
    *,
    dry_run: bool = False,
    gpus: int | None = None,
    output: Output | None = None,
) -> int:
    """Make the new run and train it to its end, as `launch` does; return its exit code.

    Args:
        parent_and_step: RUN@STEP; STEP may be latest or best.
        config: None: that of the parent.
        overrides: as `--set`; without run.name in them the run is called PARENT-fork-1, -2, ...

    Raises:
        ConfigError: the input is wrong; nothing was started, and nothing is left of the new run.
    """
    output = output or Output()
    with output.reporting():
        name, _, step_name = parent_and_step.rpartition("@")
        if not name:
            raise ConfigError(f"--fork {parent_and_step}: write RUN@STEP, e.g. quickstart@25 or quickstart@latest")
        parent = find_run(name)
        step = find_checkpoint(parent, step_name, option="--fork")
        source = config or parent.config
        folder = load_config(source, overrides).run.dir
        names = (f"{parent.root.resolve().name}-fork-{number}" for number in count(1))
        own_name = next(name for name in names if not (folder / name).exists())
        forked = load_config(source, [f"run.name={own_name}", *overrides])
        new = RunDir(forked.run_path)
        if new.root.exists():
            raise ConfigError(f"--fork: {new.root} exists already; set another run.name, or continue it with --resume")
        with writing(new):
            _make(new, parent, step)
    try:
        return launch(forked, resume=str(step), dry_run=dry_run, gpus=gpus, output=output)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--resume:", "--fork:", 1)) from error
    finally:
        if not new.attempts():  # nothing was started
            shutil.rmtree(new.root)


def _make(new: RunDir, parent: RunDir, step: int) -> None:
    """Write the directory under another name, so that one that is there is whole."""
    new.root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=new.root.parent, prefix=".fork-") as folder:
        made = RunDir(Path(folder) / "run")
        made.create()
        shutil.copytree(parent.checkpoint(step), made.checkpoint(step), copy_function=_link)
        for path in (parent.metrics, parent.evaluation_log):  # later steps are cut off at the start
            if path.exists():
                shutil.copy2(path, made.root)
        attempts = [attempt_config(parent.attempt(number)) for number in reversed(parent.attempts())]
        shutil.copy2(next((path for path in attempts if path.is_file()), parent.config), made.config)
        made.fork.write_text(json.dumps({"parent": str(parent.root.resolve()), "step": step}), encoding="utf-8")
        os.rename(made.root, new.root)


def _link(source: str, target: str) -> None:
    """Files of a checkpoint are never written again."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
