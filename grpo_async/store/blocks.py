"""The files of a store: blocks, named by the seq of their groups.

    block-000000000040.jsonl               open: lines are appended; or left by a kill
    block-000000000000-000000000039.parquet   sealed: never changes

A line is whole as soon as its line feed is there, and never changes. Sealing writes the Parquet file under another name, renames
it, and removes the lines: a kill in between leaves both, with the same content, and the Parquet file counts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from grpo_async.errors import RunError

_OPEN = re.compile(r"block-(\d{12})\.jsonl")
_SEALED = re.compile(r"block-(\d{12})-(\d{12})\.parquet")
_OLD = re.compile(r"part-\d+\.jsonl")
_TAIL_BYTES = 1 << 20
_LISTINGS = 10

TEMPORARY_SUFFIX = ".sealing"
"""Of a Parquet file that is not whole yet."""


@dataclass(frozen=True, slots=True)
class Block:
    """One file. `last_seq` is None for one that is not sealed."""

    path: Path
    first_seq: int
    last_seq: int | None = None

    @property
    def is_sealed(self) -> bool:
        return self.last_seq is not None


def open_name(first_seq: int) -> str:
    return f"block-{first_seq:012d}.jsonl"


def sealed_name(first_seq: int, last_seq: int) -> str:
    return f"block-{first_seq:012d}-{last_seq:012d}.parquet"


def find_blocks(folder: Path) -> list[Block]:
    """The blocks of a store in the order of their groups; none where there is no folder. Of a block that is there both ways only
    the sealed one. A name may be gone when it is opened: sealed, or deleted to keep to `record.rollouts.max_gb`.

    Raises:
        RunError: the folder has the files of a development version, which cannot be read.
    """
    if not folder.is_dir():
        return []
    found: dict[int, Block] = {}
    for name in _names(folder):
        if match := _SEALED.fullmatch(name):
            found[int(match[1])] = Block(folder / name, int(match[1]), int(match[2]))
        elif match := _OPEN.fullmatch(name):
            found.setdefault(int(match[1]), Block(folder / name, int(match[1])))
        elif _OLD.fullmatch(name):
            raise RunError(
                f"{folder / name} is in the form of a development version, which this one does not read; move {folder} away"
            )
    return [found[first] for first in sorted(found)]


def _names(folder: Path) -> set[str]:
    """A block that is being sealed is under one name or the other; a listing from before and after would miss both."""
    names = set(os.listdir(folder))
    for _ in range(_LISTINGS):
        again = set(os.listdir(folder))
        if again == names:
            break
        names = again
    return names


def leftover_lines(folder: Path) -> list[Path]:
    """JSON lines of blocks that are sealed already: a kill came before they were removed."""
    sealed = {block.first_seq for block in find_blocks(folder) if block.is_sealed}
    return [path for first in sealed if (path := folder / open_name(first)).exists()]


def torn_bytes(path: Path) -> int:
    """Length of the end of a file of lines that has no line feed: torn by a kill, or being written."""
    with path.open("rb") as file:
        size = end = file.seek(0, 2)
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            position = file.read(end - start).rfind(b"\n")
            if position >= 0:
                return size - (start + position + 1)
            end = start
    return size


def sql_path(path: Path) -> str:
    """A path as a parameter of DuckDB's read functions, which would take brackets, stars and question marks for a pattern: the run
    `a[1]` must not be read from `a1`."""
    return re.sub(r"[\[*?]", r"[\g<0>]", str(path))
