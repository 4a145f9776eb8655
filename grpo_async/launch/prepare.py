"""The run directory before a run: refuse one that exists, clean it, or find the checkpoint to resume from.

A directory is locked while a launcher works in it (flock on the directory itself: gone with the launcher, however it
ends), so two runs never write the same files.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_async.checks.memory import check_run_dir_writable
from grpo_async.config import ExperimentConfig
from grpo_async.config.diff import differences, texts_in
from grpo_async.config.loader import load_config
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.training.checkpoint_manifest import (
    OtherFormatError,
    damaged,
    find_checkpoint,
    holds_tensors,
    problem_of,
    set_aside,
)
from grpo_async.utils.files import read_object, temporary_of
from grpo_async.utils.run_state import FINISHED
from grpo_async.utils.text import count

_AT_RESUME = {
    "run": "free",  # where and by what it runs
    "run.seed": "fixed",
    "launch": "free",
    "inference": "free",
    "inference.engine": "noted",
    "inference.dtype": "noted",
    "inference.max_model_len": "noted",
    "model.dtype": "fixed",
    "model.lora": "fixed",
    "model.lora.dropout": "noted",
    "model.lora.push": "noted",
    "model.chat_template_kwargs": "fixed",
    "model.end_of_turn_tokens": "fixed",
    "data": "fixed",
    "data.train.path": "noted",
    "rollout.group_size": "fixed",
    "rollout.groups_per_step": "fixed",
    "loss.sync_ref_model": "fixed",
    "optimizer.type": "fixed",
}
"""Settings that differ at a resume. fixed: what a checkpoint means depends on them (its tensors, the order of the data, a group),
so others are refused. noted: they take effect, and are named. free: not even that. The longest path decides; all others are noted.
Of model.path, model.chat_template, loss.reference and data.train.path the content decides (training.fingerprints, data.stream)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins, and what `clear_run_dir` does before that."""

    resume_step: int | None = None  # None is the beginning
    resume_is_named: bool = False  # by the user
    removes: bool = False  # the directory has an old run, or what a start that failed has left
    keeps_logs: bool = False
    broken_steps: tuple[int, ...] = ()  # their checkpoints are damaged and newer than the one to resume from
    notes: tuple[str, ...] = ()


def check_start(config: ExperimentConfig, *, resume: str | None, clean: bool) -> Start:
    """Decide where the run begins; changes nothing on disk.

    Args:
        resume: None, or a name as `find_checkpoint` has it; "latest" is the newest checkpoint that is whole, as far as sizes and
            small files say (the trainer's ranks compare the checksums of its tensors).
        clean: an old run directory is going to be removed.
    """
    run_dir = RunDir(config.run_path)
    check_run_dir_writable(run_dir)
    if resume is not None and clean:
        raise ConfigError("--resume and --clean exclude each other: --clean removes what --resume starts from")
    if clean:
        _check_removable(run_dir, config)
        return Start(removes=run_dir.root.exists())
    if resume is not None and not run_dir.config.is_file():
        raise ConfigError(
            f"--resume: there is no run in {run_dir.root} (no config.yaml); leave out --resume to start one"
        )
    is_new = not run_dir.root.exists() or (run_dir.root.is_dir() and not any(run_dir.root.iterdir()))
    steps = run_dir.checkpoint_steps()
    if resume is not None and (steps or resume != "latest"):
        return _resume(run_dir, config, resume)
    if is_new:
        return Start()
    if not steps:
        _check_removable(run_dir, config)  # begin in the directory of a run without a checkpoint
    if steps or run_dir.has_steps():
        content = (
            f"a checkpoint of step {steps[-1]}: --resume continues it"
            if steps
            else "trained steps but without a checkpoint"
        )
        raise ConfigError(
            f"the run directory {run_dir.root} already exists, with {content}; --clean removes it first, a different run.name "
            "leaves it alone"
        )
    note = f"an earlier attempt in {run_dir.root} trained nothing: this run reuses the directory and keeps its logs"
    return Start(removes=True, keeps_logs=True, notes=(note,))


@contextmanager
def lock(run_dir: RunDir) -> Iterator[None]:
    """Hold the run directory (made if need be) for this process."""
    with writing(run_dir):
        run_dir.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(run_dir.root, os.O_RDONLY)  # not inherited by children (PEP 446)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another launcher is running in {run_dir.root}; end it first, or use another run.name"
            ) from error
        yield
    finally:
        os.close(descriptor)


@contextmanager
def writing(run_dir: RunDir) -> Iterator[None]:
    """A context for writes before anything is started."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.dir: {run_dir.root} cannot be written: {error}; free space, correct its permissions, or set another run.dir"
        ) from error


def clear_run_dir(run_dir: RunDir, start: Start) -> None:
    """Remove what `check_start` has found to be ours, and rename damaged checkpoints to broken_step_N, where nothing takes them for
    whole ones. config.yaml goes last: without it the directory would not be known as ours, should this be killed."""
    for entry in sorted(run_dir.root.iterdir(), key=lambda entry: entry == run_dir.config) if start.removes else ():
        if start.keeps_logs and entry == run_dir.logs:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    for step in start.broken_steps:
        set_aside(run_dir.checkpoint(step), "broken")


def _check_removable(run_dir: RunDir, config: ExperimentConfig) -> None:
    root = run_dir.root
    if not root.exists() and not root.is_symlink():
        return
    if root.is_symlink() or not root.is_dir():
        raise ConfigError(f"{root} is a link or a file, not a directory; remove it yourself")
    half_written = temporary_of(run_dir.config)  # by a run that was killed in its first moment
    if any(entry != half_written for entry in root.iterdir()) and not run_dir.config.is_file():
        raise ConfigError(f"{root} has no config.yaml, so it does not look like a run directory; remove it yourself")
    inputs = config.model_dump(mode="json", exclude={"run", "tracking"})  # those two say where the run writes
    for name, text in [("the working directory", str(Path.cwd())), *texts_in(inputs)]:
        # most texts are no paths, and os.path finds no file for one that cannot be a path
        if os.path.exists(text) and Path(text).resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"a new run in {root} would remove {name}: {text} lies there")


def _resume(run_dir: RunDir, config: ExperimentConfig, resume: str) -> Start:
    """Begin at the checkpoint that `resume` names, or at the newest that is whole."""
    broken: dict[int, str] = {}
    latest = reversed(run_dir.checkpoint_steps())
    for step in latest if resume == "latest" else [find_checkpoint(run_dir, resume, option="--resume")]:
        try:  # the tensors are for the trainer's ranks to read
            problem = problem_of(run_dir.checkpoint(step), reads=lambda name: not holds_tensors(name))
        except OtherFormatError as error:
            raise ConfigError(f"--resume {resume}: {error}") from error
        if problem is None:
            break
        broken[step] = problem
    else:
        listed = "".join(f"\n  step {step}: {problem}" for step, problem in broken.items())
        remedy = "restore one from a copy, or start over with --clean"
        if resume != "latest":
            remedy = "`--resume latest` takes the newest complete checkpoint"
        raise ConfigError(f"--resume {resume}: not complete in {run_dir.checkpoints}:{listed}\n{remedy}")
    attempts = [attempt_config(run_dir.attempt(number)) for number in run_dir.attempts()]
    # of the attempt before, as it began: config.yaml may have been edited since, and be what this resume reads
    last = load_config(next((each for each in reversed(attempts) if each.is_file()), run_dir.config))
    problems: list[str] = []
    if config.training.epochs is None:  # how many steps they make is known to the trainer only
        summary, steps = read_object(run_dir.summary, problems), config.num_steps
        if steps < step:
            raise ConfigError(
                f"--resume: step {step} of the checkpoint is beyond training.max_steps = {steps}; raise it, or `--resume N`"
            )
        # where the summary has fewer steps, evaluation or export are still to be done
        if (steps, summary.get("status"), summary.get("steps")) == (step, FINISHED, step):
            raise ConfigError(
                f"--resume: the run in {run_dir.root} has finished its {count(step, 'step')}; raise training.max_steps to train on"
            )
    notes = [f"{each}; whether the run had finished is unknown" for each in problems]
    notes += [f"{damaged(number, problem)}; resuming from step {step}" for number, problem in broken.items()]
    changed = differences([each.model_dump(mode="json") for each in (last, config)])
    if fixed := [f"\n  {each}" for each in changed if _rule_of(each.path) == "fixed"]:
        raise ConfigError(
            f"--resume: the checkpoints of {run_dir.root} were made with other values of{''.join(fixed)}\n"
            "put them back, or begin a new run (another run.name, or --clean)"
        )
    notes += [f"changed since the last attempt: {each}" for each in changed if _rule_of(each.path) == "noted"]
    return Start(resume_step=step, resume_is_named=resume != "latest", broken_steps=tuple(broken), notes=tuple(notes))


def _rule_of(key: str) -> str:
    """What `_AT_RESUME` says of a setting: that of itself, or of the nearest section above it. Entries of lists are alike."""
    key = re.sub(r"\.\d+\b", "", key)
    while key not in _AT_RESUME and "." in key:
        key = key.rpartition(".")[0]
    return _AT_RESUME.get(key, "noted")
