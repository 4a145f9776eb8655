"""Rows as a source has them: of a file (JSON lines, Parquet), of a dataset of the package `datasets`, of a Python function, or
only seeds, for data that belongs to an environment.

Every reader gives (location, row), one after the other, and raises ConfigError with the location where something is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_async.config.sections import (
    EnvironmentSource,
    GeneratorSource,
    HubSource,
    JsonlSource,
    ParquetSource,
)
from grpo_async.data.rows import ENVIRONMENT_COLUMN, LocatedRows, Row, check_values
from grpo_async.errors import ConfigError, message_of
from grpo_async.user_code.calls import Raised
from grpo_async.user_code.references import resolve
from grpo_async.utils.extras import needs
from grpo_async.utils.text import backticked, json_kind

_BATCH_ROWS = 1024  # rows of a Parquet file that are in memory as columns at once


def read_jsonl(source: JsonlSource) -> LocatedRows:
    for number, line in enumerate(_lines(source.path), start=1):
        if not line.strip():
            continue
        location = f"{source.path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{location}: this line cannot be read as JSON ({error}); a .jsonl file holds one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                f'{location}: expected a JSON object such as {{"prompt": "..."}}, got {json_kind(row)}; '
                "a .jsonl file holds one object per line, not one list"
            )
        yield location, row


def read_parquet(source: ParquetSource) -> LocatedRows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{source.path}: reading Parquet {needs('pyarrow')}") from error
    for path in _parquet_files(source.path):
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for row in batch.to_pylist():
                        yield f"{path}, row {number}", _as_written(row, file.schema_arrow)
                        number += 1
        # ValueError and OverflowError: dates and times that Python's types cannot hold
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{path}: this file cannot be read as Parquet, from row {number} on ({message_of(error)}); "
                "check that it is whole and that `path` names a Parquet file"
            ) from error


def _as_written(row: Row, schema: Any, *, is_decoded: bool = False) -> Row:
    """The row as it was before Arrow stored it: JSON columns decoded (unless `is_decoded`), and messages without the nulls that
    Arrow adds, because it gives each message, and the arguments of each tool call, every key that some other one has."""

    def restored(value: Any, kind: Any, *, in_message: bool) -> Any:
        if getattr(kind, "extension_name", "") == "arrow.json" and not is_decoded:
            return value if value is None else json.loads(value)
        if isinstance(value, list) and hasattr(kind, "value_type"):
            return [restored(item, kind.value_type, in_message=in_message) for item in value]
        if not isinstance(value, dict) or not hasattr(kind, "get_field_index"):
            return value
        in_message = in_message or kind.get_field_index("role") >= 0
        return {
            name: restored(item, kind.field(name).type, in_message=in_message)
            for name, item in value.items()
            if item is not None or not in_message
        }

    return {name: restored(value, schema.field(name).type, in_message=False) for name, value in row.items()}


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
    """Lines of a UTF-8 file; a byte order mark is skipped."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: this file is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror} (looked in {Path.cwd()}); `path` must name a readable file"
        ) from error


def read_hub(source: HubSource) -> LocatedRows:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source.name}: reading a dataset (type: hub) {needs('datasets')}; or use a file (type: jsonl or parquet)"
        ) from error
    try:
        dataset = _load(datasets, source)
    except ConfigError:
        raise
    except Exception as error:  # its own, the hub's, httpx's and OS errors: all mean this
        raise ConfigError(
            f"{hub_name(source)}: the dataset cannot be loaded ({message_of(error)}); "
            "check `name`, `subset` and `split`, and that this machine reaches the hub or holds the dataset in its cache"
        ) from error
    number, schema = 0, dataset.features.arrow_schema
    try:
        for row in dataset.with_format(None):  # numpy and torch formats were saved along
            yield f"{hub_name(source)}, row {number}", _as_written(row, schema, is_decoded=True)
            number += 1
    except Exception as error:  # of what decodes images and audio
        raise ConfigError(
            f"{hub_name(source)}, row {number}: cannot be decoded ({message_of(error)}); install what is missing, or write the "
            "columns that you need to a file (type: parquet)"
        ) from error


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


def read_generator(source: GeneratorSource) -> LocatedRows:
    """The function is called twice: a checkpoint can be continued only if it makes the same rows again, and the time to learn
    that it does not is now. The first 16 rows are compared."""
    second = islice(_rows(source), min(source.limit or _COMPARED_ROWS, _COMPARED_ROWS))
    for number, (location, row) in enumerate(_rows(source)):
        if source.limit is None and number == MAX_ROWS:
            raise ConfigError(
                f"{source.function}: has made {MAX_ROWS} rows and not come to an end; set `limit` to the number of rows wanted"
            )
        # repr: a NaN differs from itself
        if number < _COMPARED_ROWS and repr(next(second, (location, None))[1]) != repr(row):
            raise ConfigError(
                f"{location}: a second call of the function makes another row, so a run could not be continued from a "
                "checkpoint; let it draw from random.Random(SEED) instead of what changes from call to call"
            )
        yield location, row


def read_environment(source: EnvironmentSource) -> LocatedRows:
    """With first_seed 5 and the environments a, b: seeds 5, 6, 7 in a, b, a."""
    names = source.environments
    for number in range(source.num_prompts):
        row: Row = {"prompt": [{"role": "user", "content": source.prompt}], "seed": source.first_seed + number}
        if names:
            row[ENVIRONMENT_COLUMN] = names[number % len(names)]
        yield f"seed {source.first_seed + number}", row


def _rows(source: GeneratorSource) -> Iterator[tuple[str, Row]]:
    function, location = resolve(source.function), source.function
    try:
        made = function(**source.arguments)
        if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict):
            raise ConfigError(
                f"{location}: the function must yield rows, or return a list of them, not {json_kind(made)}"
            )
        for number, row in enumerate(made):
            location = f"{source.function}, row {number}"
            if not isinstance(row, dict):
                raise ConfigError(
                    f'{location}: the function must yield dicts such as {{"prompt": "..."}}, got {json_kind(row)}'
                )
            check_values(row, location)
            yield location, row
            location = f"{source.function}, row {number + 1}"
    except ConfigError:
        raise
    except Exception as error:  # the user's code: whatever it raises means this
        raise ConfigError(f"{location}: the function {Raised(error).problem}") from error
