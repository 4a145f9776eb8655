"""Rows from any source, checked before anything is started.

    read -> limit -> remove_columns, columns -> check of prompt and values -> missing columns become None -> filters by length

A row is a dict with `prompt` (text, or a list of `{role, content}` messages) and any other columns. Whatever is wrong raises
ConfigError with the location (`file:line`), the column, what is wrong there, and what to do; the notes say what was changed or
looks odd. The system prompt is applied later, when a Prompt is made.

`columns` renames, and a dotted name looks into a nested column. Worked example, with
`{problem: prompt, reward_model.ground_truth: answer}`:

    {"problem": "2+2", "reward_model": {"ground_truth": "4", "style": "rule"}, "level": 1}
    -> {"prompt": "2+2", "reward_model": {"ground_truth": "4", "style": "rule"}, "level": 1, "answer": "4"}

The nested column stays as it is. A column whose own name has a dot takes precedence over a nested one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from grpo_async.config.sections import (
    EnvironmentSource,
    GeneratorSource,
    HubSource,
    JsonlSource,
    ParquetSource,
    Source,
)
from grpo_async.data.identity import describe_duplicates, task_columns, task_key
from grpo_async.data.messages import check_prompt
from grpo_async.data.readers import (
    hub_name,
    read_environment,
    read_generator,
    read_hub,
    read_jsonl,
    read_parquet,
)
from grpo_async.data.rows import ENVIRONMENT_COLUMN, LocatedRows, Row, Rows, check_values
from grpo_async.data.stream import make_prompt
from grpo_async.errors import ConfigError
from grpo_async.records import Prompt
from grpo_async.utils.text import backticked, did_you_mean, duplicates

_READERS: Mapping[type, Callable[[Any], LocatedRows]] = {
    JsonlSource: read_jsonl,
    ParquetSource: read_parquet,
    HubSource: read_hub,
    GeneratorSource: read_generator,
    EnvironmentSource: read_environment,
}


def load_rows(source: Source, *, count_tokens: CountTokens | None = None, needs_prompt: bool = True) -> Rows:
    """The rows of `source` that pass its filters, at least one; `.notes` say what was left out or looks odd.

    Args:
        source: a section of the config.
        count_tokens: number of prompt tokens of a Prompt, chat template included; needed for `max_prompt_tokens`.
        needs_prompt: False, where the run has environments: a row without `prompt` gets an empty user message, as in TRL, and
            the environment's `reset` gives the text.
    """
    rows = _read(source, needs_prompt)
    if not rows:
        raise ConfigError(f"{_source_name(source)}: there are no rows in it; at least one with a `prompt` is needed")
    rows = _drop_long_prompts(rows, source, count_tokens)
    columns = task_columns(source)
    rows.notes += describe_duplicates(rows, [task_key(row, columns) for row in rows])
    return rows


def first_rows(source: Source, count: int, *, needs_prompt: bool = True) -> Rows:
    """The first `count` rows at most, without filters: enough to check a source and its columns before anything starts."""
    limit = min(count, source.limit or count)
    return load_rows(source.without_filters().model_copy(update={"limit": limit}), needs_prompt=needs_prompt)


def _source_name(source: Source) -> str:
    """What the user called it."""
    if isinstance(source, HubSource):
        return hub_name(source)
    if isinstance(source, GeneratorSource):
        return source.function
    if isinstance(source, EnvironmentSource):
        return "environment"
    return str(source.path)


def _read(source: Source, needs_prompt: bool) -> Rows:
    rows: list[Row] = []
    locations: list[str] = []
    unused: set[str] = set()  # keys of messages
    for location, given in islice(_READERS[type(source)](source), source.limit):
        row = rename(remove_columns(given, source.remove_columns, location), source.columns, location)
        if source.environment is not None:
            if ENVIRONMENT_COLUMN in row:
                raise ConfigError(
                    f"{location}: the row has a column `environment`, and so has the source; leave one out"
                )
            row[ENVIRONMENT_COLUMN] = source.environment
        if not needs_prompt:
            row.setdefault("prompt", [{"role": "user", "content": ""}])
        row["prompt"] = check_prompt(row, location, unused)
        check_values(row, location)
        rows.append(row)
        locations.append(location)
    notes = _fill(rows, locations)
    if unused:
        notes.append(f"messages of `prompt` have the keys {backticked(sorted(unused))}, which nothing uses")
    prompts = [row["prompt"] for row in rows]
    own = [i for i, each in enumerate(prompts) if not isinstance(each, str) and each[0]["role"] == "system"]
    if own and source.system_prompt is not None:
        notes.append(
            f"{len(own)} of {len(rows)} prompts begin with a system message of their own, and get that of `system_prompt` "
            f"before it (the first: {locations[own[0]]}); leave one of the two out"
        )
    return Rows(rows, locations=locations, notes=notes)


def _fill(rows: list[Row], locations: list[str]) -> list[str]:
    """Give every row every column: None where it had none, so that reward functions always receive it; one note per column.

    [{"prompt": "a", "level": 1}, {"prompt": "b"}] -> the second row gets "level": None.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    notes = []
    for name in names:
        without = [index for index, row in enumerate(rows) if name not in row]
        if without:
            notes.append(
                f"column `{name}` is missing in {len(without)} of {len(rows)} rows (the first: {locations[without[0]]}); "
                "it is None there"
            )
        for index in without:
            rows[index][name] = None
    return notes


def remove_columns(row: Row, names: Sequence[str], location: str) -> Row:
    """The row without the columns `names`."""
    unknown = [name for name in names if name not in row]
    if unknown:
        raise ConfigError(
            f"{location}: `remove_columns` names {backticked(unknown)}, which is not a column here; the columns are "
            f"{backticked(row)}"
        )
    return {name: value for name, value in row.items() if name not in names}


def rename(row: Row, columns: Mapping[str, str], location: str) -> Row:
    """The row with the renames of `columns` (old name -> new name)."""
    nested = [(new, _look_up(row, old, location)) for old, new in columns.items() if old not in row]
    if twice := duplicates([*(columns.get(name, name) for name in row), *(new for new, _ in nested)]):
        raise ConfigError(
            f"{location}: after `columns` there are two columns named {backticked(twice)}; rename or remove one of them "
            "(`remove_columns` leaves a column out)"
        )
    return {columns.get(name, name): value for name, value in row.items()} | dict(nested)


def _look_up(row: Row, path: str, location: str) -> Any:
    """The value under a dotted name; numbers count the entries of a list from 0."""
    value: Any = row
    for key in path.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            has = f"; there is {backticked(value)}{did_you_mean(key, value)}" if isinstance(value, dict) else ""
            raise ConfigError(f"{location}: `columns` (old: new) renames `{path}`, but there is no `{key}`{has}")
    return value


CountTokens = Callable[[Prompt], int]


def _drop_long_prompts(rows: Rows, source: Source, count_tokens: CountTokens | None) -> Rows:
    """The rows within `max_prompt_tokens`, with a note of how many were left out: "max_prompt_tokens: 3 left out 1 of 2 rows"."""
    limit = source.max_prompt_tokens
    if limit is None:
        return rows
    if count_tokens is None:
        raise ValueError("max_prompt_tokens is set: load_rows needs `count_tokens`")
    prompts = (make_prompt(row, 0, source.system_prompt) for row in rows)
    try:
        kept = [index for index, prompt in enumerate(prompts) if count_tokens(prompt) <= limit]
    except ConfigError as error:
        raise ConfigError(f"{_source_name(source)}: {error}") from error
    if len(kept) == len(rows):
        return rows
    note = f"max_prompt_tokens: {limit} left out {len(rows) - len(kept)} of {len(rows)} rows"
    if not kept:
        raise ConfigError(f"{_source_name(source)}: no row is left: {note}; raise it")
    passed = rows.take(kept)
    passed.notes = [*rows.notes, note]
    return passed
