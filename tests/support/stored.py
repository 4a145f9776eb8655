"""What a store holds, as rows; and stores that leave their blocks as lines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.store import GroupRow, RolloutStore
from grpo_async.store.rows import from_columns
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
    with RolloutTable(folder) as table:
        if table.damage:
            raise RunError("\n".join(table.damage))
        rows = table.fetch("SELECT * FROM stored ORDER BY seq, rollout_index")
    groups = [list(of_group) for _, of_group in groupby(rows, key=lambda row: row["seq"])]
    return [StoredGroup(from_columns(each), each[0]["superseded"]) for each in groups]


class LineStore(RolloutStore):
    """Leaves its blocks as JSON lines: sealing takes a process."""

    def _seal(self) -> None:
        pass
