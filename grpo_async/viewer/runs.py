"""Finds the run that a person means: a folder, or a name below runs/; and all runs of a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.utils.text import did_you_mean, shortlist

RUNS_FOLDER = Path("runs")
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class EvaluationDir(RunDir):
    """A run directory whose rollouts are those of the evaluation of step `step`."""

    step: int

    @property
    def rollouts(self) -> Path:
        return self.evaluation(self.step)

    def evaluation_steps(self) -> list[int]:
        """An evaluation has none of its own."""
        return []


def find_evaluation(run: RunDir, step: str) -> EvaluationDir:
    """The evaluation of a step of `run`; "latest": the newest."""
    steps = run.evaluation_steps()
    wanted = steps[-1] if step == "latest" and steps else int(step) if step.isdecimal() else None
    if wanted not in steps or wanted is None:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"--evaluation {step}: {run.root} has no such evaluation; it has: {known}")
    return EvaluationDir(run.root, wanted)


def find_run(name: str, runs_folder: Path = RUNS_FOLDER) -> RunDir:
    """The run directory `runs_folder`/`name`, also one in which nothing was written yet, or the run directory `name`."""
    if name.strip("/."):
        for candidate in (runs_folder / name, Path(name)):
            is_new = candidate.parent == runs_folder and os.path.isdir(candidate)
            if is_new or is_run(candidate):
                return RunDir(candidate)
    elif name and is_run(Path(name)):  # "." in a run directory
        return RunDir(Path(name).resolve())
    known = [path.name for path in sorted(_folders(runs_folder), key=lambda path: -modified_at(RunDir(path)))]
    if not known:
        raise ConfigError(f"there is no run '{name}', and {runs_folder} holds none; start one: grpo-async train CONFIG")
    hint = did_you_mean(Path(name).name, known, limit=_MAX_LISTED)
    listed = shortlist(known, ", ", limit=_MAX_LISTED)
    raise ConfigError(f"there is no run '{name}'{hint or f'; {runs_folder} holds {listed}'}")


def find_folder(name: str) -> Path | None:
    """The folder of runs that `name` is; None: it is a run, or the name of one."""
    folder = Path(name)
    return folder if not is_run(folder) and (folder == RUNS_FOLDER or runs_below(folder)) else None


def is_run(folder: Path) -> bool:
    """Whether a launcher began a run there. No folder has a name as long as a query may be (`Path.is_dir` raises then)."""
    run = RunDir(folder)
    return os.path.isdir(folder) and any(path.exists() for path in (run.config, run.status, run.metrics, run.rollouts))


def runs_below(folder: Path) -> list[RunDir]:
    """The runs of a folder, the most recently updated first, without those that this user may not read."""
    readable = [path for path in _folders(folder) if os.access(path, os.R_OK | os.X_OK)]
    written = [(modified_at(RunDir(path)), path) for path in readable if is_run(path)]
    return [RunDir(path) for _, path in sorted(written, key=lambda each: (-each[0], each[1]))]


def modified_at(run: RunDir) -> float:
    """When its status was written, or its directory (seconds since 1970); 0.0: it is gone."""
    for path in (run.status, run.root):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def labels_of(run_dirs: Sequence[RunDir]) -> list[str]:
    """A short name for each folder, all different: [runs/a, runs/b] -> ["a", "b"]; [x/a, y/a] -> ["x/a", "y/a"]."""
    paths = [run_dir.root.resolve() for run_dir in run_dirs]
    num_parts = 1
    while len({path.parts[-num_parts:] for path in paths}) < len(set(paths)):
        num_parts += 1
    return ["/".join(path.parts[-num_parts:]) for path in paths]


def _folders(folder: Path) -> list[Path]:
    """The folders below `folder`. Symlinks to sibling folders are skipped."""
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [path for path in found if not (path.is_symlink() and path.resolve().parent == folder.resolve())]
