"""Whether a checkpoint is whole: manifest.json lists its files with sizes and checksums, and is written last. One that is not to
be taken for a whole one is set aside.

    {"format": 3, "step": 40, "world_size": 2, "files": {"state.json": {"bytes": 812, "sha256": "..."}, ...}}

Loads no torch: the launcher asks before anything is started.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_async.errors import CheckpointError
from grpo_async.utils.folders import sync

FORMAT = 3
MANIFEST = "manifest.json"
STATE = "state.json"


def write_manifest(folder: Path, *, step: int, world_size: int) -> int:
    """List what `folder` holds and put it on the disk, the list last; returns the bytes of all files.

    Raises:
        OSError: a file cannot be read or the list cannot be written.
    """
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    content = {"format": FORMAT, "step": step, "world_size": world_size, "files": files}
    write_synced(folder / MANIFEST, [json.dumps(content)])
    sync(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_synced(path: Path, parts: Iterable[str]) -> None:
    """Write a file and put it on the disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    with path.open("w", encoding="utf-8") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The list.

    Raises:
        CheckpointError: it is missing, unreadable or of another format.
    """
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
    """A checkpoint that another version of this package wrote: whole, but nothing to go on from."""

    def __init__(self, folder: Path, found: object) -> None:
        super().__init__(
            f"{folder} has format {found!r}, of another version of this package ({FORMAT} is read); finish that run with that "
            "version, or begin a new one (`model/` of a finished run can be its model.path)"
        )


def problem_of(folder: Path) -> str | None:
    """Why this checkpoint cannot be used, or None: every file is there, of its size and with its checksum.

    Raises:
        OtherFormatError: another version wrote it.
    """
    try:
        manifest = read_manifest(folder)
    except OtherFormatError:
        raise
    except CheckpointError as error:
        return str(error)
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE not in files:
        return f"{folder / MANIFEST} lists no {STATE}"
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path} has {size} bytes instead of {expected['bytes']}"
            if _checksum(path) != expected["sha256"]:
                return f"{path} is damaged: its checksum is not the one it was written with"
        except FileNotFoundError:
            return f"{path} is missing"
        except (OSError, KeyError, TypeError) as error:
            return f"{path} cannot be checked: {error}"
    return None


def set_aside(checkpoint: Path, reason: str) -> Path:
    """Rename step_N to {reason}_step_N, replacing what an earlier call left; returns the new path."""
    target = checkpoint.with_name(f"{reason}_{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(checkpoint, target)
    return target


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
