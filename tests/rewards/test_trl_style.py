"""Functions written for TRL run unchanged."""

from __future__ import annotations

import asyncio

import pytest

from tests.rewards.helpers import TRL, loaded, score, values_of


def test_a_function_with_only_kwargs_beside_completion_ids_gets_the_ids() -> None:
    assert values_of(f"{TRL}:length_in_tokens", ["a", "b"]) == [1.0, 2.0]


def test_the_spelling_of_the_documentation_is_understood() -> None:
    assert values_of(f"{TRL}:documented_spelling", ["a", "b"]) == [1.0, 2.0]


def test_a_function_gets_prompts_completions_and_ids_together() -> None:
    # "What is it?" has 11 characters: 11 + 2 + 1 and 11 + 0 + 2
    assert values_of(f"{TRL}:all_three", ["ab", ""]) == [14.0, 13.0]


def test_a_conversational_completion_arrives_as_messages() -> None:
    good = [{"role": "assistant", "content": "<think>so</think><answer>12</answer>"}]
    bad = [{"role": "assistant", "content": "12"}]
    assert values_of(f"{TRL}:format_reward", [good, bad]) == [1.0, 0.0]


def test_a_column_of_the_data_arrives_as_keyword() -> None:
    completions = [r"It is \boxed{2}.", r"It is \boxed{6}."]
    columns = {"ground_truth": ["2", "5"], "unrelated": [0, 0]}
    assert values_of(f"{TRL}:boxed_reward", completions, columns) == [1.0, 0.0]


def test_multi_task_functions_answer_none_where_they_do_not_apply() -> None:
    """R1.11: the documentation's pair of functions for two tasks, as it is written there."""
    completions = ["it is 4", "def f(): pass", "it is 5"]
    columns = {"task": ["math", "coding", "math"]}
    assert values_of(f"{TRL}:math_reward_func", completions, columns) == [1.0, None, -1.0]
    assert values_of(f"{TRL}:coding_reward_func", completions, columns) == [None, 1.0, None]


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


def test_an_async_function_is_awaited() -> None:
    assert values_of(f"{TRL}:async_reward", ["is 4", "is 5"], {"ground_truth": ["4", "4"]}) == [1.0, 0.0]


def test_names_of_functions_partials_and_objects_and_an_async_call_is_awaited() -> None:
    """R1.11: names of functions, partials and callable objects; an async `__call__` is awaited."""
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


def test_an_async_partial_is_awaited_and_a_name_in_the_section_wins() -> None:
    with loaded(f"{TRL}:async_partial", name="judge") as reward:
        assert reward.name == "judge"
        assert asyncio.run(score(reward, ["4"], columns={"ground_truth": ["4"]})).values == [1.0]


def test_several_extra_columns_and_a_metric_are_kept_as_documented() -> None:
    with loaded(f"{TRL}:logs_what_it_extracted") as reward:
        outcome = asyncio.run(score(reward, [r"\boxed{4}", "5"], columns={"ground_truth": ["4", "4"]}))
    assert outcome.values == [1.0, 0.0]
    assert outcome.extra_columns == {"golden_answer": ["4", "4"], "extracted_answer": ["4", "[none]"]}
    assert outcome.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize(("step", "value"), [(4, 0.0), (5, 1.0)])
def test_a_function_sees_the_state_of_the_trainer(step: int, value: float) -> None:
    with loaded(f"{TRL}:curriculum") as reward:
        assert asyncio.run(score(reward, ["a"], step=step)).values == [value]


def test_arguments_of_the_section_are_bound() -> None:
    with loaded(f"{TRL}:scaled", arguments={"factor": 3}) as reward:
        assert asyncio.run(score(reward, ["ab"])).values == [6.0]
