"""What a rollout store holds, whole, by the reader that users have."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_async.errors import RunError
from grpo_async.store import RolloutStore
from grpo_async.store.rollout_store import Sealer
from grpo_async.store.rows import GroupRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES
from grpo_async.store.table import RolloutTable


@dataclass(frozen=True, slots=True)
class StoredGroup:
    row: GroupRow
    superseded: bool


def read_groups(folder: Path) -> list[GroupRow]:
    """Every group that counts, in the order of writing; none when the folder does not exist yet.

    Raises:
        RunError: a block or a line is damaged.
    """
    return [stored.row for stored in scan_groups(folder) if not stored.superseded]


def scan_groups(folder: Path) -> list[StoredGroup]:
    """As `read_groups`, with the superseded ones."""
    with RolloutTable.open(folder) as table:
        if table.damage:
            raise RunError("\n".join(table.damage))
        superseded = dict(table._index.fetch("SELECT seq, superseded FROM groups"))
        names = ", ".join(f'"{name}"' for name in COLUMN_NAMES)
        rows = [dict(zip(COLUMN_NAMES, row, strict=True)) for row in table._read(names, list(superseded))]
    groups = (from_columns(list(of_group)) for _, of_group in groupby(rows, key=lambda row: row["seq"]))
    return [StoredGroup(row, superseded[row.seq]) for row in groups]


class _NoSealer(Sealer):
    def add(self, path: Path) -> None:
        pass


class LineStore(RolloutStore):
    """Leaves its blocks as JSON lines: sealing takes a process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._sealer = _NoSealer(folder, 1.0)
