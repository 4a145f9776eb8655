"""Rows from any source, checked before anything is started.

    read -> limit -> drop, columns -> check of prompt and values -> missing columns become None -> filters by length

A row is a dict with `prompt` (text, or a list of `{role, content}` messages) and any other columns. Whatever is wrong raises
ConfigError with the place (`file:line`), the column, what is wrong there, and what to do; what was changed or looks odd is told
in the notes. The system prompt is applied later, when a Prompt is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from grpo_async.config.data_sections import (
    CsvSource,
    EnvironmentSource,
    GeneratorSource,
    HubSource,
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    Source,
)
from grpo_async.data import columns
from grpo_async.data.files import read_csv, read_jsonl, read_parquet
from grpo_async.data.filters import CountTokens, apply_filters
from grpo_async.data.generated import read_environment, read_generator
from grpo_async.data.hub import hub_name, read_hub
from grpo_async.data.identity import describe_duplicates, task_columns, task_key
from grpo_async.data.messages import check_prompt
from grpo_async.data.reasoning_gym import read_reasoning_gym
from grpo_async.data.rows import PlacedRows, Row, Rows, check_values, listed
from grpo_async.errors import ConfigError

_READERS: Mapping[type, Callable[[Any], PlacedRows]] = {
    JsonlSource: read_jsonl,
    CsvSource: read_csv,
    ParquetSource: read_parquet,
    HubSource: read_hub,
    ReasoningGymSource: read_reasoning_gym,
    GeneratorSource: read_generator,
    EnvironmentSource: read_environment,
}


def load_rows(source: Source, *, count_tokens: CountTokens | None = None) -> Rows:
    """The rows of `source` that pass its filters, at least one; `.notes` say what was left out or looks odd.

    Args:
        source: a section of the config.
        count_tokens: number of prompt tokens of a Prompt, chat template included; needed for `max_prompt_tokens`.

    Raises:
        ConfigError: the source cannot be read, a row cannot be used as a prompt, or no row is left.
    """
    rows = _read(source)
    if not rows:
        raise ConfigError(f"{source_name(source)}: there are no rows in it; at least one with a `prompt` is needed")
    try:
        rows = apply_filters(rows, source, count_tokens)
    except ConfigError as error:
        raise ConfigError(f"{source_name(source)}: {error}") from error
    belonging = task_columns(source)
    rows.notes += describe_duplicates(rows, [task_key(row, belonging) for row in rows])
    return rows


def first_rows(source: Source, count: int) -> Rows:
    """The first `count` rows at most, without filters: enough to check a source and its columns before anything starts."""
    unfiltered = {"min_prompt_chars": None, "max_prompt_chars": None, "max_prompt_tokens": None}
    limit = min(count, source.limit or count)
    return load_rows(source.model_copy(update={"limit": limit, **unfiltered}))


def source_name(source: Source) -> str:
    """What the user called it."""
    if isinstance(source, HubSource):
        return hub_name(source)
    if isinstance(source, GeneratorSource):
        return source.function
    if isinstance(source, ReasoningGymSource):
        return "reasoning_gym: " + ", ".join(task.name for task in source.tasks)
    if isinstance(source, EnvironmentSource):
        return "environment"
    return str(source.path)


def _read(source: Source) -> Rows:
    rows: list[Row] = []
    places: list[str] = []
    unused: set[str] = set()  # keys of messages
    for place, given in islice(_READERS[type(source)](source), source.limit):
        row = columns.rename(columns.drop(given, source.drop, place), source.columns, place)
        row["prompt"] = check_prompt(row, place, unused)
        check_values(row, place)
        rows.append(row)
        places.append(place)
    notes = _fill(rows, places)
    if unused:
        notes.append(f"messages of `prompt` have the keys {listed(sorted(unused))}, which nothing uses")
    return Rows(rows, places=places, notes=notes)


def _fill(rows: list[Row], places: list[str]) -> list[str]:
    """Give every row every column: None where it had none, so that reward functions always receive it; one note per column.

    [{"prompt": "a", "level": 1}, {"prompt": "b"}] -> the second row gets "level": None.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    notes = []
    for name in names:
        without = [index for index, row in enumerate(rows) if name not in row]
        if without:
            notes.append(
                f"column `{name}` is missing in {len(without)} of {len(rows)} rows (the first: {places[without[0]]}); "
                "it is None there"
            )
        for index in without:
            rows[index][name] = None
    return notes
