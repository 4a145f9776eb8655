"""Finds the checkpoint that a name means, and whether it is complete: manifest.json lists its files with sizes and checksums, and
is written last. One that must not be found anymore (damaged, replaced, removed) is set aside under another name.

    {"format": 7, "step": 40, "files": {"state.json": {"bytes": 812, "sha256": "..."}, ...}}

At a resume the launcher compares sizes, and the checksums of the small files; each rank those of its part of the tensors. Does not
import torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_async.errors import CheckpointError, ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import read_evaluations, scores_by_step
from grpo_async.utils.files import sync

FORMAT = 7
MANIFEST = "manifest.json"
STATE = "state.json"
_TENSORS = re.compile(r"__(\d+)_\d+\.distcp")  # DCP's name for a file of tensors, with the rank that writes it


def find_checkpoint(run_dir: RunDir, name: str, *, option: str) -> int:
    """The step of the checkpoint that `name` means: "latest"; "best" by the run's checkpoint.best_metric; a step; or a path
    RUN/checkpoints/step_N. `option` is for messages, such as "--checkpoint".

    Raises:
        ConfigError: the run has no such checkpoint, another version wrote them, or config.yaml, which "best" needs, is broken.
    """
    steps = run_dir.checkpoint_steps()
    if not steps:
        raise ConfigError(f"{option} {name}: {run_dir.checkpoints} has no checkpoint")
    try:  # first: another version's config.yaml cannot be read either, and its errors would not say why
        problem_of(run_dir.checkpoint(steps[-1]), reads=lambda name: False)
    except OtherFormatError as error:
        raise ConfigError(f"{option} {name}: {error}") from error
    known = ", ".join(map(str, steps))
    if name == "latest":
        return steps[-1]
    if name == "best":
        from grpo_async.config.loader import load_config

        best_metric = load_config(run_dir.config).checkpoint.best_metric
        ranked = best_first(steps, scores_by_step(read_evaluations(run_dir.evaluation_log, []), best_metric))
        if not ranked:
            raise ConfigError(
                f"{option} best: no checkpoint of {run_dir.root} was evaluated by {best_metric!r}; choose one of the steps {known}"
            )
        return ranked[0]
    for step in steps:
        if (name.isdecimal() and int(name) == step) or run_dir.checkpoint(step).resolve() == Path(name).resolve():
            return step
    raise ConfigError(
        f"{option} {name}: {run_dir.checkpoints} has no such checkpoint; there are latest, best, and the steps {known}"
    )


def best_first(steps: Collection[int], scores: Mapping[int, float]) -> list[int]:
    """The ones of `steps` that have a finite score, the highest first; of equal scores the newer step first.

    steps 5 10 15, scores 5: .9, 10: .9, 15: nan, 20: 1. -> [10, 5]
    """
    scored = [(score, step) for step, score in scores.items() if step in steps and math.isfinite(score)]
    return [step for _, step in sorted(scored, reverse=True)]


def write_manifest(folder: Path, *, step: int, checksums: Mapping[str, str]) -> int:
    """Write the list of the files of `folder`, which are on the disk already, and flush it; returns their total bytes.
    `checksums`: SHA-256 by name of files that need not be read again."""
    files: dict[str, dict[str, Any]] = {
        path.name: {"bytes": path.stat().st_size, "sha256": checksums.get(path.name) or checksum(path)}
        for path in sorted(folder.iterdir())
    }
    content = {"format": FORMAT, "step": step, "files": files}
    write_synced(folder / MANIFEST, [json.dumps(content)])
    sync(folder)
    return sum(each["bytes"] for each in files.values())


def write_synced(path: Path, parts: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(parts)
    sync(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if found != FORMAT:
        raise OtherFormatError(folder, found)
    return dict(content)


class OtherFormatError(CheckpointError):
    """A checkpoint that another version of this package wrote: complete, but not resumable."""

    def __init__(self, folder: Path, found: object) -> None:
        super().__init__(
            f"{folder} has format {found!r}, of another version of this package ({FORMAT} is read); finish that run with that "
            "version, or start a new one (`model/` of a finished run can be its model.path)"
        )


def holds_tensors(name: str, *, rank: int = 0, world_size: int = 1) -> bool:
    """Whether the file `name` holds tensors and is one that `rank` of `world_size` reads: those that this rank wrote, which its
    machine may still have in memory, and, if the run had more ranks, those of rank + world_size, ..."""
    writer = _TENSORS.fullmatch(name)
    return writer is not None and int(writer[1]) % world_size == rank


def problem_of(folder: Path, *, reads: Callable[[str], bool] = lambda name: True) -> str | None:
    """Why this checkpoint cannot be used; None if every file is there with its size, and those for which `reads` is true match
    their checksums. Raises OtherFormatError."""
    try:
        manifest = read_manifest(folder)
    except OtherFormatError:
        raise
    except CheckpointError as error:
        return str(error)
    if folder.name != f"step_{manifest.get('step')}":
        return f"{folder} is that of step {manifest.get('step')} under another name, by its {MANIFEST}"
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE not in files:
        return f"{folder / MANIFEST} lists no {STATE}"
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path} has {size} bytes instead of {expected['bytes']}"
            if reads(name) and checksum(path) != expected["sha256"]:
                return f"{path} is damaged: its checksum does not match"
        except FileNotFoundError:
            return f"{path} is missing"
        except (OSError, KeyError, TypeError) as error:
            return f"{path} cannot be checked: {error}"
    return None


def damaged(step: int, problem: str) -> str:
    return f"the checkpoint of step {step} is damaged and set aside as broken_step_{step}: {problem}"


def set_aside(checkpoint: Path, reason: str) -> Path:
    """Rename step_N to {reason}_step_N, replacing what an earlier call left; returns the new path."""
    target = checkpoint.with_name(f"{reason}_{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(checkpoint, target)
    return target


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
