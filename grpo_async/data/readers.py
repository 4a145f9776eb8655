"""Rows as a source has them: of a file (JSON lines, CSV, Parquet), of a dataset of the package `datasets`, of a Python function, or
only seeds, for data that belongs to an environment.

Every reader gives (place, row), one after the other, and raises ConfigError with the place where something is wrong.
"""

from __future__ import annotations

import csv
import inspect
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_async.config.data_sections import (
    CsvSource,
    EnvironmentSource,
    GeneratorSource,
    HubSource,
    JsonlSource,
    ParquetSource,
)
from grpo_async.data.rows import PlacedRows, Row, check_values
from grpo_async.errors import ConfigError
from grpo_async.user_code.references import resolve
from grpo_async.utils.extras import needs
from grpo_async.utils.text import backticked, json_kind

_BATCH_ROWS = 1024  # rows of a Parquet file that are in memory as columns at once


def read_jsonl(source: JsonlSource) -> PlacedRows:
    for number, line in enumerate(_lines(source.path), start=1):
        if not line.strip():
            continue
        place = f"{source.path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{place}: this line is not valid JSON ({error.msg} at column {error.colno}); "
                "a .jsonl file holds one complete JSON object per line"
            ) from error
        except RecursionError as error:
            raise ConfigError(f"{place}: the JSON of this line is nested too deeply to be read") from error
        except ValueError as error:
            raise ConfigError(f"{place}: a number of this line cannot be read ({error}); put it in quotes") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f'{place}: expected a JSON object such as {{"prompt": "..."}}, got {json_kind(row)}; '
                "a .jsonl file holds one object per line, not one list"
            )
        yield place, row


def read_csv(source: CsvSource) -> PlacedRows:
    reader = csv.reader(_lines(source.path), strict=True)
    header: list[str] = []
    begins_at = 1  # a quoted value may span lines; the place is where the row begins
    while True:
        place = f"{source.path}:{begins_at}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ConfigError(f"{place}: this row is not valid CSV ({error}); check its quotes") from error
        begins_at = reader.line_num + 1
        if not values:  # an empty line
            continue
        if not header:
            header = values
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise ConfigError(
                    f"{place}: the header names {backticked(twice)} more than once; give each column its own name"
                )
            continue
        if len(values) != len(header):
            raise ConfigError(
                f"{place}: this row has {len(values)} values, but the header has {len(header)} columns ({backticked(header)}); "
                "put values that hold a comma or a line break into double quotes"
            )
        yield place, dict(zip(header, values, strict=True))


def read_parquet(source: ParquetSource) -> PlacedRows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{source.path}: reading Parquet {needs('pyarrow')}") from error
    for path in _parquet_files(source.path):
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                twice = sorted({name for name in file.schema_arrow.names if file.schema_arrow.names.count(name) > 1})
                if twice:
                    raise ConfigError(f"{path}: {backticked(twice)} names more than one column; give each its own name")
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for row in batch.to_pylist():
                        yield f"{path}, row {number}", row
                        number += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(
                f"{path}: this file cannot be read as Parquet, from row {number} on ({type(error).__name__}: {error}); "
                "check that it is whole and that `path` names a Parquet file"
            ) from error


def _parquet_files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such file or folder (looked in {Path.cwd()}); correct the `path`, or make it first"
        )
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise ConfigError(f"{path}: this folder has no *.parquet file")
    return files


def _lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file with their ends (a CSV value may hold some); a byte order mark is skipped."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: there is no such file (looked in {Path.cwd()}); correct the `path`, or make the file first"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: this file is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: this file cannot be read ({error.strerror}); `path` must name a readable file"
        ) from error


def read_hub(source: HubSource) -> PlacedRows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source.name}: reading a dataset (type: hub) {needs('datasets')}; or use a file (type: jsonl, csv or parquet)"
        ) from error
    try:
        dataset = _load(datasets, source)
    except ConfigError:
        raise
    except Exception as error:  # its own, the hub's, httpx's and OS errors: all mean this
        raise ConfigError(
            f"{hub_name(source)}: the dataset cannot be loaded ({type(error).__name__}: {error}); "
            "check `name`, `subset` and `split`, and that this machine reaches the hub or holds the dataset in its cache"
        ) from error
    for number, row in enumerate(dataset.with_format(None)):  # numpy and torch formats were saved along
        yield f"{hub_name(source)}, row {number}", dict(row)


def hub_name(source: HubSource) -> str:
    """What the user called it."""
    return f"{source.name}{f'/{source.subset}' if source.subset else ''} [{source.split}]"


def _load(datasets: Any, source: HubSource) -> Any:
    folder = Path(source.name)
    if not ((folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()):
        return datasets.load_dataset(source.name, source.subset, split=source.split, revision=source.revision)
    for setting in ("subset", "revision"):
        if getattr(source, setting) is not None:
            raise ConfigError(f"{source.name}: a folder that save_to_disk wrote has no `{setting}`; leave it out")
    saved = datasets.load_from_disk(source.name)
    if isinstance(saved, dict):
        if source.split not in saved:
            raise ConfigError(
                f"{source.name}: has no split `{source.split}`; it has {backticked(saved)}. For a part of one set `limit`"
            )
        return saved[source.split]
    own = str(saved.split) if saved.split is not None else "train"
    if source.split != own:
        raise ConfigError(
            f"{source.name}: save_to_disk wrote one dataset here, the split `{own}`; set `split: {own}`, not `{source.split}`"
        )
    return saved


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
            raise ConfigError(f'{place}: expected a dict such as {{"prompt": "..."}}, got {json_kind(row)}')
        check_values(row, place)
        yield place, row
        number += 1


def _start(source: GeneratorSource) -> Iterator[Any]:
    function = resolve(source.function)
    if not callable(function):
        raise ConfigError(
            f"{source.function}: is {json_kind(function)}, which cannot be called; name a generator function"
        )
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
        raise ConfigError(
            f"{source.function}: returned {json_kind(made)}; it must yield rows, or return a list of them"
        )
    return iter(made)
