"""What is shown stands still while the run writes: it ends at the newest group of the moment it was opened."""

from __future__ import annotations

from grpo_async.store.query import EVERYTHING, Query, both, parse_query
from grpo_async.store.table import RolloutTable


def newest_seq(table: RolloutTable) -> int:
    """Of all groups, superseded or not; -1: there is none."""
    rows = table.group_page(EVERYTHING, sort="-seq", limit=1, with_superseded=True)
    return rows[0].seq if rows else -1


def query_until(text: str, seq: int) -> Query:
    """What `text` holds for among the groups up to `seq`."""
    return both(parse_query(text), parse_query(f"seq<={seq}"))
