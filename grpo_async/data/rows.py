"""Rows and their locations.

A row is a dict of JSON-like values (dates, decimals and bytes too, which Parquet and datasets know). Its location is what errors
call it: `train.jsonl:7` is a line counted from 1, as editors do; `train.parquet, row 7` is counted from 0, as `dataset[7]` does.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.utils.text import json_kind

Row = dict[str, Any]
LocatedRows = Iterator[tuple[str, Row]]

ENVIRONMENT_COLUMN = "environment"
"""The column that names a row's environment."""

# Plain values: they pickle, print the same in every process, and mean the same to a reward function in a worker process.
_SCALARS = (type(None), bool, int, float, str, bytes, decimal.Decimal)
_TIMES = (datetime.date, datetime.time, datetime.timedelta)  # a datetime is a date


class Rows(list[Row]):
    """Rows, the location of each, and `notes`: sentences that the user should read before the run starts."""

    def __init__(self, rows: Iterable[Row] = (), *, locations: Iterable[str] = (), notes: Iterable[str] = ()) -> None:
        super().__init__(rows)
        self.locations = list(locations)
        self.notes = list(notes)
        assert len(self.locations) == len(self), f"{len(self)} rows, {len(self.locations)} locations"

    def take(self, indexes: Sequence[int]) -> Rows:
        """These rows with their locations, in this order; without the notes, which are about the whole."""
        return Rows((self[index] for index in indexes), locations=(self.locations[index] for index in indexes))


def check_values(row: Row, location: str) -> None:
    """Raise a ConfigError for the first value that is not plain data, with its column."""
    for name, value in row.items():
        if not isinstance(name, str):
            raise ConfigError(f"{location}: the name of a column must be text, got {json_kind(name)}")
        unsupported = _unsupported(value)
        if unsupported is not None:
            raise ConfigError(
                f"{location}: column `{name}` holds a {type(unsupported).__module__}.{type(unsupported).__qualname__}, but only "
                "text, numbers, booleans, null, lists and objects with text keys (also dates, decimals, bytes) can be used; "
                f"convert it, or leave the column out with `remove_columns: [{name}]`"
            )


def _unsupported(value: Any) -> Any | None:
    """What in `value` is not plain data, or None. Subclasses of plain types (numpy's text, enums) are unsupported, too."""
    if type(value) in _SCALARS or isinstance(value, _TIMES):
        return None
    if type(value) in (list, tuple):
        return next((found for below in value if (found := _unsupported(below)) is not None), None)
    if type(value) is dict:
        for key, below in value.items():
            if type(key) is not str:
                return key if key is not None else value
            found = _unsupported(below)
            if found is not None:
                return found
        return None
    return value
