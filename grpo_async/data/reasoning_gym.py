"""Rows from reasoning-gym, made in a separate process (`reasoning_gym_child`).

Some tasks go through sets of text, so that their rows depend on Python's hash seed, which differs from process to process: a run
could not be continued from a checkpoint. The child has a fixed one. It also keeps the library out of the trainer: the import takes
seconds, and its tasks print, and run code of their datasets.

A row: `prompt` (text), `answer` (text, or None where any of several is right), `task` (its name), `task_data` (what the task's
scorer needs, as the text of a Python literal: JSON would make lists of tuples and text of numbers as keys).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from grpo_async.config.sections import ReasoningGymSource
from grpo_async.data.rows import LocatedRows
from grpo_async.errors import ConfigError
from grpo_async.utils.extras import needs
from grpo_async.utils.processes import describe_exit

_OWN_SETTINGS = ("seed", "size")
_TIMEOUT_S = 600.0  # that making the rows may take


def read_reasoning_gym(source: ReasoningGymSource) -> LocatedRows:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"reasoning_gym: making its rows {needs('reasoning_gym')}")
    for number, task in enumerate(source.tasks):
        for setting in _OWN_SETTINGS:
            if setting in task.config:
                raise ConfigError(f"tasks.{number}.config.{setting}: set `{setting}` beside `tasks`, for all of them")
    size = min(source.size, source.limit or source.size)
    order = list(islice(mixed_evenly([task.weight for task in source.tasks]), size))
    made = _run_child(source, [order.count(number) for number in range(len(source.tasks))])
    rows = [enumerate(of_task) for of_task in made]
    for number in order:
        name = source.tasks[number].name
        index, (question, answer, task_data) = next(rows[number])
        yield f"{name}, row {index}", {"prompt": question, "answer": answer, "task": name, "task_data": task_data}


def mixed_evenly(weights: Sequence[float]) -> Iterator[int]:
    """Endless indexes, each as often as its weight says and never far from it: (2, 1) -> 0 1 0 0 1 0 ...

    Every turn gives each index its weight as credit; the one with the most pays the sum of all weights and goes next.
    """
    credit = [0.0] * len(weights)
    while True:
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        chosen = max(range(len(credit)), key=credit.__getitem__)
        credit[chosen] -= sum(weights)
        yield chosen


def _run_child(source: ReasoningGymSource, counts: Sequence[int]) -> list[list[Any]]:
    """Per task its rows, each (question, answer, task_data)."""
    tasks = [
        {"name": task.name, "config": task.config, "count": count}
        for task, count in zip(source.tasks, counts, strict=True)
    ]
    command = [sys.executable, "-W", "ignore", "-m", "grpo_async.data.reasoning_gym_child"]
    try:
        ended = subprocess.run(
            command,
            input=json.dumps({"tasks": tasks, "seed": source.seed}),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"},
            encoding="utf-8",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"reasoning_gym: making {sum(counts)} rows took longer than {_TIMEOUT_S:g} s; lower `size`, "
            "or make the tasks smaller by their `config`"
        ) from error
    if ended.returncode != 0:
        last = "\n".join(ended.stderr.strip().splitlines()[-10:])
        raise ConfigError(f"reasoning_gym: the process that makes the rows {describe_exit(ended.returncode)}:\n{last}")
    answer = json.loads(ended.stdout)
    if "error" in answer:
        raise ConfigError(f"reasoning_gym: {answer['error']}")
    rows: list[list[Any]] = answer["rows"]
    return rows
