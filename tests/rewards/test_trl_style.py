"""Functions written for TRL run unchanged."""

from __future__ import annotations

import asyncio

import pytest

from tests.rewards.helpers import TRL, loaded, score, values_of


def test_a_function_with_only_kwargs_beside_completion_ids_gets_the_ids() -> None:
    assert values_of(f"{TRL}:length_in_tokens", ["a", "b"]) == [1.0, 2.0]


def test_a_function_of_completions_gets_plain_strings() -> None:
    assert values_of(f"{TRL}:length_in_characters", [" blue.", " in the sky."]) == [6.0, 12.0]


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


def test_none_stays_none() -> None:
    assert values_of(f"{TRL}:only_math", ["a", "b"], {"task": ["math", "code"]}) == [1.0, None]


def test_an_async_function_is_awaited() -> None:
    assert values_of(f"{TRL}:async_reward", ["is 4", "is 5"], {"ground_truth": ["4", "4"]}) == [1.0, 0.0]


def test_names_of_functions_partials_and_objects_and_an_async_call_is_awaited() -> None:
    """R1.11"""
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


def test_what_a_function_logs_is_in_the_outcome() -> None:
    with loaded(f"{TRL}:logging_reward") as reward:
        outcome = asyncio.run(score(reward, ["4", "5"], columns={"ground_truth": ["4", "4"]}))
    assert outcome.values == [1.0, 0.0]
    assert outcome.extra_columns == {"golden_answer": ["4", "4"]}
    assert outcome.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize(("step", "value"), [(4, 0.0), (5, 1.0)])
def test_a_function_sees_the_state_of_the_trainer(step: int, value: float) -> None:
    with loaded(f"{TRL}:curriculum") as reward:
        assert asyncio.run(score(reward, ["a"], step=step)).values == [value]


def test_arguments_of_the_section_are_bound() -> None:
    with loaded(f"{TRL}:scaled", arguments={"factor": 3}) as reward:
        assert asyncio.run(score(reward, ["ab"])).values == [6.0]
