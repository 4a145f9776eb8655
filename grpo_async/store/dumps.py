"""Whole rows, with texts and tokens, in the order of writing: what an export consists of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_async.store.index import Index
from grpo_async.store.query_sql import Sql
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, SCHEMA
from grpo_async.store.seal import ROWS_PER_GROUP
from grpo_async.store.table_sql import JOINED
from grpo_async.store.tables import ROW_KEY

NAMES = (*COLUMN_NAMES, "superseded")
COLUMNS_SQL = ", ".join(f'"{name}"' for name in NAMES)
_ROWS_AT_ONCE = 256


def _as_json(name: str, type_: str) -> str:
    """The column as JSON has it: JSON as what it stands for, single precision with the digits that it needs."""
    if type_ == "JSON":
        return f'"{name}"::JSON'
    if type_ == "FLOAT[]":
        return f"replace(\"{name}\"::VARCHAR, 'NULL', 'null')::JSON"
    return f'"{name}"'


JSON_SQL = (
    "to_json({"
    + ", ".join(f"'{column.name}': {_as_json(column.name, column.type)}" for column in COLUMNS)
    + ", 'superseded': superseded})::VARCHAR"
)


def rows(index: Index, columns: str, where: Sql) -> Iterator[tuple[Any, ...]]:
    """`columns` of the rollouts for which `where` holds, one block after the other."""
    for select in _selects(index, columns, where, " ORDER BY seq, rollout_index"):
        yield from index.stream(select, _ROWS_AT_ONCE)


def write_parquet(index: Index, path: Path, where: Sql) -> None:
    """One Parquet file, whose folder the index may write to. Without a sort, which would hold everything in memory: DuckDB
    keeps the order of the blocks and, within one, of the rows."""
    selects = _selects(index, COLUMNS_SQL, where, "")
    whole = (
        selects[0] if selects else Sql(f"SELECT {COLUMNS_SQL} FROM (SELECT *, false AS superseded FROM loose) LIMIT 0")
    )
    for select in selects[1:]:
        whole = whole + " UNION ALL " + select
    target = "'" + str(path.absolute()).replace("'", "''") + "'"
    options = (
        f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROWS_PER_GROUP}, "
        f"KV_METADATA {{grpo_async_schema: '{SCHEMA}'}}"
    )
    for _ in index.stream(Sql("COPY (") + whole + f") TO {target} ({options})", 1):
        pass  # the number of rows


def _selects(index: Index, columns: str, where: Sql, order: str) -> list[Sql]:
    keys = Sql(f"SELECT r.row_key FROM {JOINED} WHERE ") + where
    whole = f"SELECT {columns} FROM (SELECT *, {index.superseded()} AS superseded FROM "
    return [Sql(whole) + part + f") WHERE {ROW_KEY} IN (" + keys + ")" + order for part in index.parts()]
