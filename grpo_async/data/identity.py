"""When two rows are the same task: what duplicates, the held-out split and the leak check mean by "the same".

The key is the conversation without its system messages, letter case and whitespace aside, and the values of the task columns.
Worked example: "What is  2+2?" and [{system: Be brief.}, {user: what is 2+2?}] have one key. A prompt without any text says
nothing about its task (an environment's reset does), so there every column counts.

The functions below hold rows out for evaluation, and find those that are both trained and evaluated on. Keys decide which rows
are held out, never positions. Rows with the same key stay on the same side, so the two sides never share a prompt.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Collection
from typing import Any

from grpo_async.config.sections import EnvironmentSource, Source
from grpo_async.data.rows import ENVIRONMENT_COLUMN, Row, Rows
from grpo_async.errors import ConfigError
from grpo_async.utils.text import shortlist


def task_columns(source: Source) -> set[str]:
    """Columns of the source that belong to a row's task, apart from the prompt."""
    own = {"seed"} if isinstance(source, EnvironmentSource) else set()
    return {*source.task_columns, *own, ENVIRONMENT_COLUMN}  # another environment is another task


def task_key(row: Row, columns: Collection[str]) -> str:
    """The same text for two rows if and only if they are the same task."""
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said: list[list[Any]] = [
        [message["role"], _normalized(message["content"]), message.get("tool_calls", [])]
        for message in messages
        if message["role"] != "system"
    ]
    if not any(content for _, content, _ in said):
        columns = row.keys() - {"prompt"}
    values = {name: row[name] for name in sorted(columns) if row.get(name) is not None}
    return json.dumps([said, values], sort_keys=True, default=repr, ensure_ascii=False)


def describe_duplicates(rows: Rows, keys: list[str]) -> list[str]:
    """No or one note: how many rows repeat an earlier one."""
    first: dict[str, int] = {}
    repeats = [(index, earlier) for index, key in enumerate(keys) if (earlier := first.setdefault(key, index)) != index]
    if not repeats:
        return []
    index, earlier = repeats[0]
    return [
        f"{len(repeats)} of {len(rows)} rows repeat the prompt of an earlier row (the first: {rows.locations[index]} repeats "
        f"{rows.locations[earlier]}); they are kept"
    ]


def _normalized(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


_NUM_SHOWN = 3


def split_held_out(rows: Rows, held_out: float, *, columns: Collection[str]) -> tuple[Rows, Rows]:
    """(rows to train on, rows held out). The held-out rows come in the order of their hashes, which is a random one, so that
    the first of them are a fair sample; the others keep their order.

    A fraction: a row is held out if its hash, as a number in [0, 1), is below it: 1000 rows and 0.05 give about 50. Rows that are
    added later move no other row. A number: the rows with the smallest hashes, at least that many (rows with one key are not torn
    apart). Rows that are added later can push a held-out row back into training, but no row out of it.
    """
    keys = [task_key(row, columns) for row in rows]
    hashes = {key: _hash(key) for key in keys}
    order = sorted(range(len(rows)), key=lambda index: (hashes[keys[index]], index))
    if held_out < 1:
        chosen = [index for index in order if hashes[keys[index]] < held_out]
    else:
        chosen = order[: int(held_out)]
        chosen += [index for index in order[len(chosen) :] if keys[index] == keys[chosen[-1]]]
    if not chosen or len(chosen) == len(rows):
        what = "no row is held out" if not chosen else "all rows are held out and none is left to train on"
        raise ConfigError(f"data.held_out: {held_out:g} of {len(rows)} rows: {what}; choose another fraction or number")
    train = rows.take(sorted(set(range(len(rows))) - set(chosen)))
    train.notes = rows.notes
    return train, rows.take(chosen)


def find_leaks(train: Rows, evaluation: Rows, columns: Collection[str]) -> str | None:
    """One sentence about rows of `evaluation` whose task is also in `train`; None if there are none."""
    locations: dict[str, str] = {}
    for row, location in zip(train, train.locations, strict=True):
        locations.setdefault(task_key(row, columns), location)
    leaks = [
        (location, locations[key])
        for row, location in zip(evaluation, evaluation.locations, strict=True)
        if (key := task_key(row, columns)) in locations
    ]
    if not leaks:
        return None
    shown = shortlist([f"{location} is also {other}" for location, other in leaks], limit=_NUM_SHOWN)
    return f"{len(leaks)} of {len(evaluation)} prompts to evaluate on are trained on as well: {shown}"


def _hash(key: str) -> float:
    """A number in [0, 1), the same on every machine. (The salt stays as it is: another one would hold out other rows.)"""
    digest = hashlib.sha256(f"held out, seed 0\n{key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
