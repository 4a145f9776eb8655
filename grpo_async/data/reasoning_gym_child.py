"""The process that makes the rows of reasoning-gym tasks: a request as JSON on stdin, one answer as JSON on stdout.

{"tasks": [{"name": "gcd", "config": {}, "count": 2}], "seed": 0}
-> {"rows": [[[question, answer, task_data], [question, answer, task_data]]]}   or   {"error": "what the user should correct"}
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from grpo_async.errors import message_of
from grpo_async.utils.processes import die_with_parent


class TaskError(Exception):
    """The user should change the source; the message starts with the setting."""


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tasks print must not mix with the answer
    request = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        answer = {"rows": [make_rows(task, number, request["seed"]) for number, task in enumerate(request["tasks"])]}
    except TaskError as error:
        answer = {"error": str(error)}
    json.dump(answer, answers)
    answers.close()


def make_rows(task: Mapping[str, Any], number: int, seed: int) -> list[list[Any]]:
    """(question, answer, task_data) of each row of the task, which is entry `number` of the source.

    Raises:
        TaskError: the task is unknown, its config is wrong, or it cannot be used.
    """
    name, config = task["name"], task["config"]
    if task["count"] == 0:
        return []
    dataset = _create(name, config, number, seed, task["count"])
    made: list[list[Any]] = []
    for index in range(task["count"]):
        try:
            entry = dataset[index]
            task_data = as_literal({"config": config, "entry": entry})
        except Exception as error:
            raise TaskError(f"tasks.{number}: {name}, row {index}: making it failed: {message_of(error)}") from error
        made.append([plain(entry["question"]), plain(entry["answer"]), task_data])
    return made


def _create(name: str, config: Mapping[str, Any], number: int, seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    where = f"tasks.{number}"
    if name not in DATASETS:
        # wider than `did_you_mean`: many names are as short as `gcd`
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(f'`{other}`' for other in near)}?" if near else f"it has {sorted(DATASETS)}"
        raise TaskError(f"{where}.name: reasoning-gym has no task `{name}`; {hint}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)
    except Exception as error:
        raise TaskError(f"{where}.config: the task `{name}` refuses {dict(config)}: {message_of(error)}") from error


def as_literal(value: Any) -> str:
    """Text that `ast.literal_eval` reads back as the same value.

    Raises:
        ValueError: it would not.
    """
    kept = plain(value)
    text = repr(kept)
    if ast.literal_eval(text) != kept:
        raise ValueError("its data cannot be written down as a Python literal")
    return text


def plain(value: Any) -> Any:
    """The value made of Python's own types only: enums give their values, numpy's scalars and arrays numbers and lists."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool):
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, dict):
        return {plain(key): plain(below) for key, below in value.items()}
    for group in (list, tuple, set):
        if isinstance(value, group):
            return group(plain(below) for below in value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise ValueError(f"its data hold a {type(value).__name__}, which cannot be written down as a Python literal")


if __name__ == "__main__":
    main()
