"""Rows from a JSONL file, a CSV file or a dataset of the hub, checked before anything is started.

A row is a dict with `prompt` (text, or a list of `{role, content}` messages) and any other columns. Whatever is wrong raises
ConfigError with the place (`file:line`), what is wrong there, and what to do. Renames come first, then `limit`, then the check
of each row; the system prompt is applied later, when a Prompt is made.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_async.config.sections import CsvSource, HubSource, JsonlSource, Source
from grpo_async.errors import ConfigError

Row = dict[str, Any]


def load_rows(source: Source) -> list[Row]:
    """The first `source.limit` rows of `source` with its renames applied; at least one.

    Raises:
        ConfigError: the file is missing, empty or broken, or a row cannot be used as a prompt.
    """
    places_and_rows = islice(_READERS[type(source)](source), source.limit)
    rows = []
    for place, row in places_and_rows:
        renamed = _rename(row, source.columns, place)
        _check_prompt(renamed, place)
        rows.append(renamed)
    if not rows:
        raise ConfigError(f"{_name(source)}: there are no rows in it; at least one with a `prompt` is needed")
    return rows


def _read_jsonl(source: JsonlSource) -> Iterator[tuple[str, Row]]:
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
        if not isinstance(row, dict):
            raise ConfigError(
                f'{place}: expected a JSON object such as {{"prompt": "..."}}, got {_kind(row)}; '
                "a .jsonl file holds one object per line, not one list"
            )
        yield place, row


def _read_csv(source: CsvSource) -> Iterator[tuple[str, Row]]:
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
                    f"{place}: the header names {_listed(twice)} more than once; give each column its own name"
                )
            continue
        if len(values) != len(header):
            raise ConfigError(
                f"{place}: this row has {len(values)} values, but the header has {len(header)} columns ({_listed(header)}); "
                "put values that hold a comma or a line break into double quotes"
            )
        yield place, dict(zip(header, values, strict=True))


def _read_hub(source: HubSource) -> Iterator[tuple[str, Row]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"{source.name}: reading a dataset (type: hub) needs the package `datasets`: pip install 'grpo-async[hub]'; "
            "or use a file (type: jsonl or csv)"
        ) from error
    try:
        dataset = load_dataset(source.name, source.subset, split=source.split)
    except Exception as error:  # its own, the hub's, httpx's and OS errors: all mean this
        raise ConfigError(
            f"{_name(source)}: the dataset cannot be loaded ({type(error).__name__}: {error}); "
            "check `name`, `subset` and `split`, and that this machine reaches the hub or holds the dataset in its cache"
        ) from error
    for number, row in enumerate(dataset):
        yield f"{_name(source)}, row {number}", dict(row)


_READERS: Mapping[type, Callable[[Any], Iterator[tuple[str, Row]]]] = {
    JsonlSource: _read_jsonl,
    CsvSource: _read_csv,
    HubSource: _read_hub,
}


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


def _rename(row: Row, columns: Mapping[str, str], place: str) -> Row:
    """`{"problem": "2+2", "level": 1}` with `{problem: prompt}` -> `{"prompt": "2+2", "level": 1}`."""
    unknown = [old for old in columns if old not in row]
    if unknown:
        raise ConfigError(
            f"{place}: `columns` renames {_listed(unknown)}, which is not a column here; the columns are {_listed(row)}"
        )
    renamed: Row = {}
    for name, value in row.items():
        new = columns.get(name, name)
        if new in renamed:
            raise ConfigError(
                f"{place}: after `columns` there are two columns named `{new}`; rename or remove one of them"
            )
        renamed[new] = value
    return renamed


def _check_prompt(row: Row, place: str) -> None:
    if "prompt" not in row:
        raise ConfigError(
            f"{place}: there is no column `prompt`; the columns are {_listed(row)}. "
            "Rename the one that holds the prompt, for example `columns: {problem: prompt}`"
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{place}: `prompt` is empty text; fill it in or remove the row")
        return
    if not isinstance(prompt, list):
        raise ConfigError(
            f"{place}: `prompt` must be text or a list of {{role, content}} messages, got {_kind(prompt)}"
        )
    if not prompt:
        raise ConfigError(f"{place}: `prompt` is a list without messages; give at least one {{role, content}} message")
    for index, message in enumerate(prompt):
        _check_message(message, f"{place}: `prompt[{index}]`")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ConfigError(f"{where} must be a {{role, content}} message, got {_kind(message)}")
    for key in ("role", "content"):
        if key not in message:
            raise ConfigError(f"{where} has no `{key}` (it has {_listed(message)}); a message is {{role, content}}")
        if not isinstance(message[key], str):
            raise ConfigError(f"{where}: its `{key}` must be text, got {_kind(message[key])}")


def _name(source: Source) -> str:
    """What the user called it."""
    if isinstance(source, HubSource):
        return f"{source.name}{f'/{source.subset}' if source.subset else ''} [{source.split}]"
    return str(source.path)


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "(none)"


def _kind(value: Any) -> str:
    """A value's JSON type, in words, with the value where it is short."""
    words = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    if value is None:
        return "null"
    word = words.get(type(value), type(value).__name__)
    return f"{word} ({text})" if len(text := repr(value)) <= 40 else word
