"""How the values of a field are distributed, for `RolloutTable.histogram` and `.facets`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_async.store.index import Index
from grpo_async.store.query_fields import Kind, Place
from grpo_async.store.query_sql import Sql
from grpo_async.store.summaries import Histogram
from grpo_async.store.table_sql import JOINED, words_field
from grpo_async.store.tables import ROW_KEY


def histogram_of(
    fetch: Callable[[Sql], list[tuple[Any, ...]]], field: str, value: Sql, where: Sql, bins: int
) -> Histogram:
    """Worked example: values 0, 1, 1, 3 with at most 30 bins: edges -0.5, 0.5, 1.5, 2.5, 3.5, counts 1, 2, 0, 1. Values 0.0, 0.5,
    1.0 with 2 bins: edges 0.0, 0.5, 1.0, counts 1, 2.

    Args:
        value: over `r` and `g`. where: which rollouts count. bins: most that are made, 1 or more.
    """
    values = (
        Sql("SELECT try_cast(") + value + f" AS DOUBLE) AS value FROM {JOINED} WHERE r.rollout_index IS NOT NULL AND "
    )
    finite = Sql("WITH known AS (SELECT if(isfinite(value), value, NULL) AS value FROM (") + values + where + ")) "
    ((number, low, high, whole, missing),) = fetch(
        finite
        + "SELECT count(value), min(value), max(value), bool_and(value = floor(value)), count(*) - count(value) FROM known"
    )
    if not number:
        return Histogram(field=field, edges=[], counts=[], num_null=missing)
    if whole and high - low < bins:
        low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1
    elif low == high:
        low, high, bins = low - 0.5, high + 0.5, 1
    width = (high - low) / bins
    counted = fetch(
        finite
        + Sql(
            "SELECT least(greatest(floor((value - ?) / ?)::BIGINT, 0), ?) AS bin, count(*) FROM known "
            "WHERE value IS NOT NULL GROUP BY bin",
            (low, width, bins - 1),
        )
    )
    counts = [0] * bins
    for place, count in counted:
        counts[place] = count
    edges = [low + width * k for k in range(bins)] + [high]
    return Histogram(field=field, edges=edges, counts=counts, num_null=missing)


def most_frequent(index: Index, field: str, where: Sql, limit: int) -> list[tuple[str, int]]:
    """The values of a field and the number of rollouts that have them, the most frequent first; NULL is none.

    Raises:
        QueryError: no such field.
    """
    kind, value = words_field(field)
    order = Sql(" WHERE value IS NOT NULL GROUP BY value ORDER BY 2 DESC, 1 LIMIT ?", (limit,))
    if kind.place is Place.BLOCKS:
        keys = Sql(f"SELECT r.row_key FROM {JOINED} WHERE r.rollout_index IS NOT NULL AND ") + where
        source = index.source(index.sealed_blocks()) + f" WHERE {ROW_KEY} IN (" + keys + ")"
        values = Sql("SELECT ") + value + " AS value FROM " + source
    else:
        each = Sql("unnest(list_distinct(") + value + "))" if kind.kind is Kind.LIST else value
        values = Sql("SELECT ") + each + f" AS value FROM {JOINED} WHERE r.rollout_index IS NOT NULL AND " + where
    found = index.fetch(Sql("SELECT value, count(*) FROM (") + values + ")" + order)
    return [(_word(value), count) for value, count in found]


def _word(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
