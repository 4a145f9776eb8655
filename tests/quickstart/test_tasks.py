"""The tasks: what is asked, the two ways to answer, the split; by hand, and against the packages and rewards of a run."""

from __future__ import annotations

import asyncio
import json
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from grpo_async.config.sections import EnvironmentSection, ToolSection
from grpo_async.envs import load_environments
from grpo_async.envs.guessing_game import GuessingGame
from grpo_async.quickstart.tasks import (
    MAX_GUESSES,
    TASKS,
    ChainSum,
    CodeTask,
    Demonstration,
    Formula,
    Game,
    GameTask,
    ThinkTask,
    ToolTask,
    _SumTask,
)
from grpo_async.tools import load_tools

ITEM = ChainSum.of(3, 4, -2, 1)


@pytest.mark.parametrize(
    ("name", "num_training", "num_items"),
    [
        ("think", None, 2012),
        ("tool", 4000, 4400),
        ("code", None, 680),
        ("game", None, 693),
    ],
)
def test_the_split_covers_every_item_once(name: str, num_training: int | None, num_items: int) -> None:
    """99 ranges x 7 numbers; 10^3 numbers x 2^2 signs; 20 constants x 2 signs x (8 factors x 2 forms + 1 square)."""
    training, held_out = TASKS[name].training_items(), TASKS[name].held_out_items()
    assert not set(training) & set(held_out)
    asked = [{json.dumps(TASKS[name].row(item), sort_keys=True) for item in side} for side in (training, held_out)]
    assert asked[0].isdisjoint(asked[1])
    if isinstance(TASKS[name], _SumTask):  # no held-out sum is trained on in another order
        terms = [{tuple(sorted(item.terms)) for item in side} for side in (training, held_out)]
        assert terms[0].isdisjoint(terms[1])
    assert len(set(training)) + len(set(held_out)) == num_items
    assert len(training) == (num_training or len(training))
    assert len(held_out) >= (63 if name in ("code", "game") else 200)  # what their configs evaluate


# ---- sums ----


@pytest.mark.parametrize("task", [ThinkTask(), ToolTask()], ids=lambda task: task.name)
def test_prompt_and_answer_agree_and_a_guess_is_near(task: ThinkTask) -> None:
    for item in task.all_items():
        row = task.row(item)
        prompt = row["prompt"][0]["content"]
        assert str(eval(prompt.rpartition(": ")[2].removesuffix("="))) == row["answer"]  # digits and signs, our own
    rng, item = random.Random(0), task.all_items()[100]
    assert (task.good(item, rng).prompt, task.lazy(item, rng).prompt) == (task.question(item),) * 2
    guesses = {task.lazy(item, rng).turns[0].text.removeprefix("<think></think>") for _ in range(400)}
    assert guesses == {str(item.answer + error) for error in range(-9, 10)}


def test_thinking_shows_each_step_and_then_the_answer() -> None:
    shown = ThinkTask().good(ITEM, random.Random(0))
    assert shown.turns[0].text == "<think>3 + 4 = 7\n7 - 2 = 5\n5 + 1 = 6</think>6"
    assert {int(step.rpartition("= ")[2]) for item in ThinkTask().all_items() for step in item.steps} == set(range(10))


def test_the_good_way_asks_the_calculator_and_repeats_its_answer() -> None:
    task = ToolTask()
    for item in task.training_items()[:50]:
        call, final = task.good(item, random.Random(0)).turns
        assert call.call is not None
        assert (call.call.name, call.call.arguments) == ("calculator", {"expression": item.text})
        assert call.result == final.text == task.row(item)["answer"]
    (tool,) = load_tools([ToolSection(function="grpo_async.tools.calculator:calculator")])
    assert task.tools() == [tool.schema]


# ---- code ----


def _passes(text: str, tests: list[str]) -> bool:
    """In this process: the text is one of ours."""
    names: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # 3 (x + 2): "int is not callable, did you miss a comma?"
            exec(text.removeprefix("```python\n").removesuffix("```"), names)
        for test in tests:
            exec(test, names)
    except (SyntaxError, TypeError, AssertionError):
        return False
    return True


def test_every_translation_passes_its_tests_and_no_copy_does() -> None:
    task, item = CodeTask(), Formula("3 (x + 2)", "3 * (x + 2)")
    assert item.tests == ["assert f(0) == 6", "assert f(3) == 15", "assert f(10) == 36"]
    assert task.row(item) == {"prompt": [{"role": "user", "content": "f(x) = 3 (x + 2)"}], "tests": item.tests}
    for item in CodeTask().all_items():
        assert _passes(task.good(item, random.Random(0)).turns[0].text, item.tests), item
        assert not _passes(task.lazy(item, random.Random(0)).turns[0].text, item.tests), item
    # 2 (x + 3) is 2 x + 6: 10 + 6 + 5 + 4 + 3 + 2 + 2 + 2 = 34 products of a factor (2 to 9) up to 20, with both signs 68
    assert len({tuple(item.tests) for item in CodeTask().all_items()}) == 680 - 68  # another formula rarely passes


# ---- game ----


def _guesses(shown: Demonstration) -> list[int]:
    return [turn.call.arguments["number"] for turn in shown.turns if turn.call is not None]


def test_searching_halves_what_is_left_and_finds_every_number_in_three_guesses() -> None:
    shown = GameTask().good(Game(low=231, target=235), random.Random(0))
    assert shown.prompt == "Guess my number from 231 to 237."
    assert _guesses(shown) == [234, 236, 235]
    assert [turn.result for turn in shown.turns] == ["higher", "lower", None]  # the end is not answered
    for target in range(5, 12):
        guesses = _guesses(GameTask().good(Game(low=5, target=target), random.Random(0)))
        assert guesses[-1] == target
        assert len(guesses) <= MAX_GUESSES == 3


def test_the_environment_of_a_run_takes_the_rows_and_offers_the_tools_that_the_model_was_shown() -> None:
    async def schemas() -> Sequence[Mapping[str, Any]]:
        factory = "grpo_async.envs.guessing_game:GuessingGame"
        environments = load_environments({"game": EnvironmentSection(factory=factory)})
        try:
            return environments.schemas_for({})
        finally:
            await environments.aclose()

    task = GameTask()
    assert task.tools() == asyncio.run(schemas())
    row = task.row(Game(low=231, target=235))
    assert GuessingGame(max_guesses=3).reset(**row) == "Guess my number from 231 to 237."
    assert row["prompt"] == [{"role": "user", "content": ""}]
    assert not {game.low for game in task.training_items()} & {game.low for game in task.held_out_items()}
