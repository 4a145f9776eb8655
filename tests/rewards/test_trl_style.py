"""Functions written for TRL run unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.rewards.helpers import TRL, loaded, score, values_of


@pytest.mark.parametrize(
    ("function", "completions", "columns", "values"),
    [
        ("length_in_tokens", ["a", "b"], {}, [1.0, 2.0]),
        ("documented_spelling", ["a", "b"], {}, [1.0, 2.0]),
        ("all_three", ["ab", ""], {}, [14.0, 13.0]),  # "What is it?" has 11 characters: 11 + 2 + 1 and 11 + 0 + 2
        ("format_reward", [[{"role": "assistant", "content": "<think>so</think><answer>12</answer>"}],
                           [{"role": "assistant", "content": "12"}]], {}, [1.0, 0.0]),
        ("boxed_reward", [r"It is \boxed{2}.", r"It is \boxed{6}."], {"ground_truth": ["2", "5"], "unrelated": [0, 0]},
         [1.0, 0.0]),
        ("math_reward_func", ["it is 4", "def f(): pass", "it is 5"], {"task": ["math", "coding", "math"]}, [1.0, None, -1.0]),
        ("coding_reward_func", ["it is 4", "def f(): pass", "it is 5"], {"task": ["math", "coding", "math"]}, [None, 1.0, None]),
        ("async_reward", ["is 4", "is 5"], {"ground_truth": ["4", "4"]}, [1.0, 0.0]),
        ("async_partial", ["4"], {"ground_truth": ["4"]}, [1.0]),
    ],
)  # fmt: skip
def test_functions_of_the_documentation_get_what_they_ask_for(
    function: str, completions: list[Any], columns: dict[str, list[Any]], values: list[float | None]
) -> None:
    """R1.11: sync or async, functions or partials, for plain text or messages; None where they do not apply."""
    assert values_of(f"{TRL}:{function}", completions, columns) == values


class Counting:
    def __init__(self, counter: int) -> None:
        self.counter = counter


def _with_environments(function: str, environments: list[object] | None, **section: object) -> list[float | None]:
    with loaded(f"{TRL}:{function}", **section) as reward:
        call = reward.score(["p"] * 2, ["a", "b"], [[1], [1]], {}, environments=environments)
        return asyncio.run(call).values


@pytest.mark.parametrize(
    "function", ["counter_reward", "counter_from_kwargs", "counter_if_there_is_one", "async_counter_reward"]
)
def test_environments_arrive_as_the_users_own_objects(function: str) -> None:
    assert _with_environments(function, [Counting(3), Counting(5)]) == [3.0, 5.0]


def test_without_environments_the_keyword_is_absent() -> None:
    assert _with_environments("counter_if_there_is_one", None) == [None, None]
    with loaded(f"{TRL}:names_of_keywords") as reward:
        alone = asyncio.run(score(reward, ["a"])).extra_columns["names"]
        inside = asyncio.run(reward.score(["p"], ["a"], [[1]], {}, environments=[object()])).extra_columns["names"]
    assert "environments" not in alone[0].split()
    assert set(inside[0].split()) - set(alone[0].split()) == {"environments"}


def test_a_function_in_a_process_gets_no_environments_but_the_rest() -> None:
    assert _with_environments("counter_if_there_is_one", [Counting(3), Counting(5)], run_in="process") == [None, None]


def test_names_of_functions_partials_and_objects_and_an_async_call_is_awaited() -> None:
    """R1.11: names of functions, partials and callable objects; an async `__call__` is awaited. The section's name wins."""
    cases = {
        "length_in_characters": ("length_in_characters", [3.0]),
        "scaled_by_ten": ("scaled", [30]),
        "length_target": ("LengthTarget", [-2.0]),
        "async_judge": ("AsyncJudge", [0.0]),
    }
    for attribute, (name, values) in cases.items():
        with loaded(f"{TRL}:{attribute}") as reward:
            assert reward.name == name
            assert asyncio.run(score(reward, ["abc"])).values == values
    with loaded(f"{TRL}:scaled", name="judge", arguments={"factor": 3}) as reward:
        assert reward.name == "judge"
        assert asyncio.run(score(reward, ["ab"])).values == [6.0]
