"""Columns of a row: some are left out, some get another name, and a dotted name looks into a nested one.

Worked example, with `{problem: prompt, reward_model.ground_truth: answer}`:

    {"problem": "2+2", "reward_model": {"ground_truth": "4", "style": "rule"}, "level": 1}
    -> {"prompt": "2+2", "reward_model": {"ground_truth": "4", "style": "rule"}, "level": 1, "answer": "4"}

The nested column stays as it is. A column whose own name has a dot is meant before a nested one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.data.rows import Row, kind, listed
from grpo_async.errors import ConfigError


def drop(row: Row, names: Sequence[str], place: str) -> Row:
    """The row without these columns."""
    unknown = [name for name in names if name not in row]
    if unknown:
        raise ConfigError(
            f"{place}: `drop` names {listed(unknown)}, which is not a column here; the columns are {listed(row)}"
        )
    return {name: value for name, value in row.items() if name not in names}


def rename(row: Row, columns: Mapping[str, str], place: str) -> Row:
    """The row with the renames of `columns` (old name -> new name)."""
    renamed: Row = {}
    for name, value in row.items():
        _put(renamed, columns.get(name, name), value, place)
    for old, new in columns.items():
        if old not in row:
            if new in row and "." not in old:
                raise ConfigError(
                    f"{place}: `columns` renames `{old}`, which is not a column here, to `{new}`, which is; it is written "
                    f"old: new, so perhaps `{{{new}: {old}}}`"
                )
            _put(renamed, new, _look_up(row, old, place), place)
    return renamed


def _put(row: Row, name: str, value: Any, place: str) -> None:
    if name in row:
        raise ConfigError(
            f"{place}: after `columns` there are two columns named `{name}`; rename or remove one of them "
            "(`drop` leaves a column out)"
        )
    row[name] = value


def _look_up(row: Row, path: str, place: str) -> Any:
    """The value under a dotted name; numbers count the entries of a list from 0."""
    value: Any = row
    walked: list[str] = []
    for key in path.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            raise ConfigError(_missing(path, walked, key, value, place))
        walked.append(key)
    return value


def _missing(path: str, walked: Sequence[str], key: str, owner: Any, place: str) -> str:
    if not walked:
        near = difflib.get_close_matches(key, owner, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"{place}: `columns` renames `{path}`, which is not a column here; the columns are {listed(owner)}{hint}"
    inside = ".".join(walked)
    if isinstance(owner, dict):
        return f"{place}: `columns` renames `{path}`, but `{inside}` has no `{key}`; it has {listed(owner)}"
    if isinstance(owner, list):
        return f"{place}: `columns` renames `{path}`, but `{inside}` is a list of {len(owner)} without an entry `{key}`"
    return f"{place}: `columns` renames `{path}`, but `{inside}` is {kind(owner)}, which has nothing below it"
