"""Rows that no file holds: made by a Python function, or only seeds, for data that belongs to an environment."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from grpo_async.config.data_sections import EnvironmentSource, GeneratorSource
from grpo_async.data.rows import PlacedRows, Row, check_values, kind
from grpo_async.errors import ConfigError
from grpo_async.user_code.references import resolve

MAX_ROWS = 100_000
"""More rows than this and no `limit`: the generator is taken for one without end."""

_COMPARED_ROWS = 16


def read_generator(source: GeneratorSource) -> PlacedRows:
    """The function is called twice: a checkpoint can be continued only if it makes the same rows again, and the time to learn
    that it does not is now. The first 16 rows are compared."""
    second = islice(_rows(source), min(source.limit or _COMPARED_ROWS, _COMPARED_ROWS))
    for number, (place, row) in enumerate(_rows(source)):
        if source.limit is None and number == MAX_ROWS:
            raise ConfigError(
                f"{source.function}: has made {MAX_ROWS} rows and not come to an end; set `limit` to the number of rows wanted"
            )
        if number < _COMPARED_ROWS:
            again = next(second, (place, None))[1]
            if repr(again) != repr(row):  # not `!=`: a NaN differs from itself
                raise ConfigError(
                    f"{place}: a second call of the function makes another row, so a run could not be continued from a "
                    "checkpoint; let it draw from random.Random(SEED) instead of what changes from call to call"
                )
        yield place, row


def read_environment(source: EnvironmentSource) -> PlacedRows:
    """With first_seed 5 and the environments a, b: seeds 5, 6, 7 in a, b, a."""
    names = source.environments
    for number in range(source.num_prompts):
        row: Row = {"prompt": [{"role": "user", "content": source.prompt}], "seed": source.first_seed + number}
        if names:
            row["environment"] = names[number % len(names)]
        yield f"seed {source.first_seed + number}", row


def _rows(source: GeneratorSource) -> Iterator[tuple[str, Row]]:
    rows = _start(source)
    number = 0
    while True:
        place = f"{source.function}, row {number}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the user's code: whatever it raises means this
            raise ConfigError(f"{place}: the function raised {type(error).__name__}: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f'{place}: expected a dict such as {{"prompt": "..."}}, got {kind(row)}')
        check_values(row, place)
        yield place, row
        number += 1


def _start(source: GeneratorSource) -> Iterator[Any]:
    function = resolve(source.function)
    if not callable(function):
        raise ConfigError(f"{source.function}: is {kind(function)}, which cannot be called; name a generator function")
    try:
        inspect.signature(function).bind(**source.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source.function}: does not fit the `arguments` {source.arguments}: {error}") from error
    try:
        made = function(**source.arguments)
    except Exception as error:  # the user's code: whatever it raises means this
        raise ConfigError(f"{source.function}: the function raised {type(error).__name__}: {error}") from error
    if inspect.isasyncgen(made) or inspect.isawaitable(made):
        raise ConfigError(f"{source.function}: is async; rows come from a plain generator function")
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict):
        raise ConfigError(f"{source.function}: returned {kind(made)}; it must yield rows, or return a list of them")
    return iter(made)
