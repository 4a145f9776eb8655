"""Reads the rollout store, also while it is being written.

A last line without a line feed is torn (a kill) or still being written: it is skipped. Any other line that cannot be
read is a damaged file and an error. One row is in memory at a time. What a run wrote after the checkpoint that it later went on
from is left out, unless it is asked for: those groups were not trained in the run as it now is (`branches`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.store.branches import read_branches
from grpo_async.store.rows import GroupRow, from_json

_PART_NAME = re.compile(r"part-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A row and where its line begins, so that it can be read again without keeping it."""

    row: GroupRow
    part: Path
    offset: int  # bytes from the start of the part
    superseded: bool = False  # written after the checkpoint that the run went on from


def parts(folder: Path) -> list[Path]:
    """The parts of a store, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _PART_NAME.fullmatch(path.name)), key=part_number)


def part_number(part: Path) -> int:
    match = _PART_NAME.fullmatch(part.name)
    assert match is not None
    return int(match[1])


def read_groups(folder: Path) -> Iterator[GroupRow]:
    """Every group, in the order of writing; none when the folder does not exist yet.

    Raises:
        RunError: a line in the middle of a part is damaged; the message names file and line.
    """
    return (stored.row for stored in scan_groups(folder))


def scan_groups(folder: Path, *, with_superseded: bool = False) -> Iterator[StoredGroup]:
    """As `read_groups`, with the place of each row."""
    branches = read_branches(folder)
    for part in parts(folder):
        offset = 0
        with part.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = from_json(line)
                except ValueError as error:
                    raise RunError(
                        f"{part}:{number}: the line is damaged: {error}; remove it to read the rest"
                    ) from error
                superseded = any(branch.covers(part_number(part), offset) for branch in branches)
                if with_superseded or not superseded:
                    yield StoredGroup(row, part, offset, superseded)
                offset += len(line)


def read_group_at(part: Path, offset: int) -> bytes:
    """The JSON line that begins at `offset`, without its line end."""
    with part.open("rb") as file:
        file.seek(offset)
        return file.readline().rstrip(b"\n")
