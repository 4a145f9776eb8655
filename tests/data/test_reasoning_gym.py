"""Rows of reasoning-gym, through the real library in its own process."""

from __future__ import annotations

import ast
import json
from itertools import islice
from typing import Any

import pytest

from grpo_async.config.sections import ReasoningGymSource
from grpo_async.data.reasoning_gym import mixed_evenly
from grpo_async.data.reasoning_gym_child import TaskError, as_literal, make_rows
from grpo_async.data.sources import first_rows, load_rows
from grpo_async.errors import ConfigError


def _source(*tasks: dict[str, Any], size: int = 4, **settings: Any) -> ReasoningGymSource:
    return ReasoningGymSource.model_validate({"type": "reasoning_gym", "tasks": tasks, "size": size, **settings})


def test_tasks_are_mixed_evenly_by_weight() -> None:
    assert list(islice(mixed_evenly([2, 1]), 6)) == [0, 1, 0, 0, 1, 0]
    assert list(islice(mixed_evenly([1, 1]), 4)) == [0, 1, 0, 1]
    picks = list(islice(mixed_evenly([0.5, 0.2, 0.3]), 100))
    assert [picks.count(number) for number in range(3)] == [50, 20, 30]


def test_rows_have_text_answer_task_and_what_the_scorer_needs() -> None:
    tasks = ({"name": "gcd", "weight": 2, "config": {"max_value": 9}}, {"name": "isomorphic_strings"})
    rows = load_rows(_source(*tasks, size=99, limit=5, seed=3))
    assert [row["task"] for row in rows] == ["gcd", "isomorphic_strings", "gcd", "gcd", "isomorphic_strings"]
    assert rows.locations[3] == "gcd, row 2"
    data = ast.literal_eval(rows[0]["task_data"])
    assert data["config"] == {"max_value": 9}
    assert data["entry"]["question"] == rows[0]["prompt"]
    assert data["entry"]["answer"] == rows[0]["answer"]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.slow
def test_rows_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _source(
        {"name": "isomorphic_strings"}, size=20
    )  # goes through a set of letters: the hash seed would decide
    made = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        made.append(load_rows(source))
    assert made[0] == made[1]
    assert first_rows(source, 2) == made[0][:2]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"name": "gcd", "config": {"max_valu": 9}}, "tasks.2.config: the task `gcd` refuses {'max_valu': 9}"),
        ({"name": "gcd", "config": {"min_numbers": 0}}, "tasks.2.config: the task `gcd` refuses {'min_numbers': 0}"),
    ],
)
def test_a_bad_task_is_named(task: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError) as caught:
        make_rows({"config": {}, "count": 2, **task}, 2, 0)
    assert words in str(caught.value)


def test_what_the_child_refuses_is_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^reasoning_gym: tasks\.0\.name: reasoning-gym has no task `gdc`; did you mean `gcd`"
    ):
        load_rows(_source({"name": "gdc"}))
    with pytest.raises(ConfigError, match=r"tasks\.0\.config\.seed: set `seed` beside `tasks`"):
        load_rows(_source({"name": "gcd", "config": {"seed": 9}}))


def test_task_data_keep_what_json_would_change() -> None:
    import numpy

    value = {"moves": [(1, 2)], 3: None, "name": numpy.str_("a"), "grid": numpy.array([[1, 0]]), "set": {1}, "x": 0.1}
    assert ast.literal_eval(as_literal(value)) == {**value, "grid": [[1, 0]]}
    for unusable in ({"x": float("inf")}, {"x": object()}):
        with pytest.raises(ValueError, match=r"cannot be written down|malformed"):
            as_literal(unusable)
