"""Rows from a file of this machine: JSON lines, CSV, Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from grpo_async.config.data_sections import CsvSource, JsonlSource, ParquetSource
from grpo_async.data.rows import PlacedRows, kind, listed
from grpo_async.errors import ConfigError

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
                f'{place}: expected a JSON object such as {{"prompt": "..."}}, got {kind(row)}; '
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
                    f"{place}: the header names {listed(twice)} more than once; give each column its own name"
                )
            continue
        if len(values) != len(header):
            raise ConfigError(
                f"{place}: this row has {len(values)} values, but the header has {len(header)} columns ({listed(header)}); "
                "put values that hold a comma or a line break into double quotes"
            )
        yield place, dict(zip(header, values, strict=True))


def read_parquet(source: ParquetSource) -> PlacedRows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{source.path}: reading Parquet needs the package `pyarrow`: pip install 'grpo-async[parquet]'"
        ) from error
    for path in _parquet_files(source.path):
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                twice = sorted({name for name in file.schema_arrow.names if file.schema_arrow.names.count(name) > 1})
                if twice:
                    raise ConfigError(f"{path}: {listed(twice)} names more than one column; give each its own name")
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
