"""Rows made by functions, and rows that are only seeds."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.config.data_sections import EnvironmentSource, GeneratorSource
from grpo_async.data import readers
from grpo_async.data.sources import load_rows
from grpo_async.data.stream import make_prompt
from grpo_async.errors import ConfigError


def _source(function: str, **settings: Any) -> GeneratorSource:
    return GeneratorSource(type="generator", function=f"tests.data.generators:{function}", **settings)


def _environment(**settings: Any) -> EnvironmentSource:
    return EnvironmentSource(type="environment", **settings)


def test_a_generator_gets_its_arguments_and_its_rows_are_named() -> None:
    rows = load_rows(_source("sums", arguments={"num_rows": 3, "seed": 1}))
    assert len(rows) == 3
    assert rows != load_rows(_source("sums", arguments={"num_rows": 3, "seed": 2}))
    assert rows.places[2] == "tests.data.generators:sums, row 2"


def test_a_function_may_return_a_list() -> None:
    assert load_rows(_source("as_list")) == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_generator_without_end_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROWS", 50)
    assert len(load_rows(_source("endless", limit=60))) == 60
    with pytest.raises(ConfigError, match="has made 50 rows and not come to an end; set `limit`"):
        load_rows(_source("endless"))
    assert len(load_rows(_source("sums", arguments={"num_rows": 50}))) == 50


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises_at_two", "row 2: the function raised ZeroDivisionError: no third one"),
        ("unseeded", "row 0: a second call of the function makes another row"),
        ("no_dict", "row 1: expected a dict"),
        ("strange_value", "row 0: column `answer` holds a builtins.set"),
        ("asynchronous", "is async"),
        ("returns_text", "returned text ('abc'); it must yield rows"),
        ("not_a_function", "cannot be called"),
        ("sum", "did you mean"),
        ("sums", "does not fit the `arguments` {}: missing a required argument: 'num_rows'"),
    ],
)
def test_a_bad_generator_is_named_with_the_row(function: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rows(_source(function, limit=20))
    assert "tests.data.generators" in str(caught.value)
    assert words in str(caught.value)


def test_an_environments_rows_are_seeds_with_an_empty_user_message() -> None:
    rows = load_rows(_environment(num_prompts=3, first_seed=5))
    assert rows == [{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in (5, 6, 7)]
    assert rows.notes == []
    prompt = make_prompt(rows[0], 0, None)
    assert prompt.is_conversational
    assert prompt.columns == {"seed": 5}


def test_several_environments_take_turns() -> None:
    rows = load_rows(_environment(num_prompts=3, prompt="Play.", environments=["a", "b"]))
    assert [(row["seed"], row["environment"]) for row in rows] == [(0, "a"), (1, "b"), (2, "a")]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Play."}]
    assert rows.notes == []  # one prompt, but not one task
