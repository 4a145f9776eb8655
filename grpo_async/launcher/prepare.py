"""The run directory before a run: refuse one that exists, clean it, or find the checkpoint to resume from.

A directory is locked while a launcher works in it (flock on the directory itself: gone with the launcher, however it
ends), so two runs never write the same files.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_async.checks.disk import check_run_place
from grpo_async.config import ExperimentConfig
from grpo_async.config.diff import differences
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.training.checkpoint_manifest import (
    OtherFormatError,
    damaged,
    find_checkpoint,
    holds_tensors,
    problem_of,
    set_aside,
)
from grpo_async.utils.files import read_object
from grpo_async.utils.run_state import FINISHED

# What a checkpoint means depends on these: other weights, another order of the data, another meaning of a group.
_FIXED = (
    "run.seed",
    "model.path",
    "model.dtype",
    "data.train",
    "data.shuffle",
    "data.held_out",
    "rollout.group_size",
    "rollout.groups_per_step",
)
_FREE = ("run.dir", "run.name", "launch", "inference")  # where and by what it runs: no word needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: `resume_step` None is the beginning; `resume_is_named`: the user has named it. `notes` tell what the user
    should know; `broken_steps` have checkpoints that are damaged and newer than the one to resume from (see `set_aside_broken`);
    `is_reused`: the directory has what a start that failed has left, which goes but for its logs (see `empty`)."""

    resume_step: int | None
    resume_is_named: bool = False
    is_reused: bool = False
    broken_steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def check_start(config: ExperimentConfig, *, resume: str | None, clean: bool) -> Start:
    """Decide where the run begins; changes nothing on disk.

    Args:
        resume: None, or a name as `find_checkpoint` has it; "latest" is the newest checkpoint that is whole, as far as sizes and
            small files say (the trainer's ranks compare the checksums of its tensors).
        clean: an old run directory is going to be removed.

    Raises:
        ConfigError: the directory is taken, is not ours to remove, or has nothing to resume from.
    """
    run_dir = RunDir(config.run_path)
    check_run_place(run_dir)
    if resume is not None and clean:
        raise ConfigError("--resume and --clean exclude each other: --clean removes what --resume starts from")
    if clean:
        _check_removable(run_dir, config)
        return Start(resume_step=None)
    if resume is not None:
        return _resume(run_dir, config, resume)
    if run_dir.root.exists() and (not run_dir.root.is_dir() or any(run_dir.root.iterdir())):
        steps = run_dir.checkpoint_steps()
        if steps:
            raise ConfigError(
                f"the run directory {run_dir.root} already exists, with a checkpoint of step {steps[-1]}: "
                "--resume continues it, --clean removes it first, a different run.name leaves it alone"
            )
        return _reuse(run_dir, config)
    return Start(resume_step=None)


def _reuse(run_dir: RunDir, config: ExperimentConfig) -> Start:
    """Begin in the directory of a run without a checkpoint.

    Raises:
        ConfigError: it is not a run directory, or the run has trained steps.
    """
    _check_removable(run_dir, config)
    if run_dir.metrics.exists() and run_dir.metrics.stat().st_size > 0:
        raise ConfigError(
            f"the run directory {run_dir.root} already exists, with trained steps but without a checkpoint to continue from: "
            "--clean removes it first, a different run.name leaves it alone"
        )
    note = f"an earlier attempt in {run_dir.root} trained nothing: this run reuses the directory and keeps its logs"
    return Start(resume_step=None, is_reused=True, notes=(note,))


@contextmanager
def lock(run_dir: RunDir) -> Iterator[None]:
    """Hold the run directory (made if need be) for this process.

    Raises:
        ConfigError: another launcher holds it, or it cannot be made.
    """
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
    """For what is written before anything is started.

    Raises:
        ConfigError: the directory takes nothing (full, read-only, immutable, another user's).
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.dir: {run_dir.root} cannot be written: {error}; free space, correct its permissions, or set another run.dir"
        ) from error


def set_aside_broken(run_dir: RunDir, start: Start) -> None:
    """Rename checkpoints that `check_start` found damaged to broken_step_N, where nothing takes them for whole ones."""
    for step in start.broken_steps:
        set_aside(run_dir.checkpoint(step), "broken")


def empty(run_dir: RunDir, *, keeps_logs: bool = False) -> None:
    """Remove everything in the run directory (`check_start` has said that it is ours). Its config.yaml goes last: without it the
    directory would not be known as ours, should this be killed."""
    for entry in sorted(run_dir.root.iterdir(), key=lambda entry: entry == run_dir.config):
        if keeps_logs and entry == run_dir.logs:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _check_removable(run_dir: RunDir, config: ExperimentConfig) -> None:
    root = run_dir.root
    if not root.exists() and not root.is_symlink():
        return
    if root.is_symlink() or not root.is_dir():
        raise ConfigError(f"{root} is a link or a file, not a directory; remove it yourself")
    # by a run that was killed in its first moment
    half_written = run_dir.config.with_name(f"{run_dir.config.name}.tmp")
    if any(entry != half_written for entry in root.iterdir()) and not run_dir.config.is_file():
        raise ConfigError(f"{root} has no config.yaml, so it does not look like a run directory; remove it yourself")
    for name, path in _inputs(config):
        if path.exists() and path.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"a new run in {root} would remove {name}: {path} lies there")
    if Path.cwd().is_relative_to(root.resolve()):
        raise ConfigError(f"a new run in {root} would remove the working directory, which is inside it")


def _inputs(config: ExperimentConfig) -> Iterator[tuple[str, Path]]:
    yield "model.path", Path(config.model.path)
    if config.model.chat_template is not None:
        yield "model.chat_template", config.model.chat_template
    for name, source in (
        ("data.train", config.data.train),
        ("evaluation.data", getattr(config.evaluation, "data", None)),
    ):
        path = getattr(source, "path", None)
        if path is not None:
            yield f"{name}.path", path


def _resume(run_dir: RunDir, config: ExperimentConfig, resume: str) -> Start:
    if not run_dir.config.is_file():
        raise ConfigError(
            f"--resume: there is no run in {run_dir.root} (no config.yaml); leave out --resume to start one"
        )
    steps = run_dir.checkpoint_steps()
    if not steps and resume == "latest":
        return _reuse(run_dir, config)
    if resume == "latest":
        step, broken = _newest_whole(run_dir, steps)
    else:
        step, broken = find_checkpoint(run_dir, resume, option="--resume"), {}
        try:
            problem = _problem_at_start(run_dir.checkpoint(step))
        except OtherFormatError as error:
            problem = str(error)
        if problem is not None:
            raise ConfigError(f"--resume {resume}: {problem}; `--resume latest` takes the newest complete checkpoint")
    # else evaluation or export are still to be done
    problems: list[str] = []
    finished = _finished_steps(run_dir, config, problems)
    if finished is not None and step >= finished:
        setting = "max_steps" if config.training.epochs is None else "epochs"
        raise ConfigError(
            f"--resume: the run in {run_dir.root} has finished its {finished} steps; raise training.{setting} to train on"
        )
    notes = [f"{each}; whether the run had finished is unknown" for each in problems]
    notes += [f"{damaged(number, problem)}; resuming from step {step}" for number, problem in broken.items()]
    if not run_dir.metrics.exists():
        notes.append(f"{run_dir.metrics} is missing: the metrics up to step {step} are lost; later ones follow")
    changes = _compare_with_last_attempt(run_dir, config)
    return Start(
        resume_step=step, resume_is_named=resume != "latest", broken_steps=tuple(broken), notes=(*notes, *changes)
    )


def _problem_at_start(checkpoint: Path) -> str | None:
    """See problem_of; tensors are for the trainer's ranks to read."""
    return problem_of(checkpoint, reads=lambda name: not holds_tensors(name))


def _newest_whole(run_dir: RunDir, steps: Sequence[int]) -> tuple[int, dict[int, str]]:
    """The step to resume from, and what is wrong with each newer one.

    Raises:
        ConfigError: none is whole.
    """
    broken: dict[int, str] = {}
    for step in reversed(steps):
        try:
            problem = _problem_at_start(run_dir.checkpoint(step))
        except OtherFormatError as error:
            raise ConfigError(f"--resume: {error}") from error
        if problem is None:
            return step, broken
        broken[step] = problem
    raise ConfigError(
        "\n".join(
            [
                f"--resume: no checkpoint in {run_dir.checkpoints} is complete:",
                *(f"  step {step}: {problem}" for step, problem in broken.items()),
                "restore one from a copy, or start over with --clean",
            ]
        )
    )


def _finished_steps(run_dir: RunDir, config: ExperimentConfig, problems: list[str]) -> int | None:
    """How many steps a run had that is finished; None where it is not, or not as long as `config` wants it: also an earlier attempt
    with fewer steps or epochs leaves a summary that says so. A summary that cannot be read is a sentence in `problems`."""
    summary, training = read_object(run_dir.summary, problems), config.training
    steps = summary.get("steps")
    if summary.get("status") != FINISHED or not isinstance(steps, int):
        return None
    if training.epochs is None:
        return config.num_steps if steps >= config.num_steps else None
    last = _last_config(run_dir).training
    is_longer = last.epochs is None or training.epochs > last.epochs
    return None if is_longer or (training.max_steps or math.inf) > (last.max_steps or math.inf) else steps


def _last_config(run_dir: RunDir) -> ExperimentConfig:
    """Of the attempt before."""
    from grpo_async.config.loader import load_config

    return load_config(run_dir.config)


def _compare_with_last_attempt(run_dir: RunDir, config: ExperimentConfig) -> Iterator[str]:
    changed = differences([each.model_dump(mode="json") for each in (_last_config(run_dir), config)])
    fixed = [each for each in changed if _is_below(each.path, _FIXED)]
    if fixed:
        raise ConfigError(
            "\n".join(
                [
                    f"--resume: the checkpoints of {run_dir.root} were made with other values of",
                    *(f"  {each}" for each in fixed),
                ]
            )
            + "\nput them back, or begin a new run (another run.name, or --clean)"
        )
    for each in changed:
        if not _is_below(each.path, _FREE):
            yield f"changed since the run started: {each}"


def _is_below(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)
