"""The tasks: what is asked, the two ways to answer, the split."""

from __future__ import annotations

import json
import random

import pytest

from grpo_async.config.sections import ToolSection
from grpo_async.quickstart.tasks import TASKS, ChainSum, ThinkTask, ToolTask
from grpo_async.tools import load_tools

ITEM = ChainSum.of(3, 4, -2, 1)


@pytest.mark.parametrize(("name", "num_items"), [("think", 2012), ("tool", 4400)])
def test_the_split_covers_every_item_once(name: str, num_items: int) -> None:
    training, held_out = TASKS[name].training_items(), TASKS[name].held_out_items()
    assert not set(training) & set(held_out)
    asked = [{json.dumps(TASKS[name].row(item), sort_keys=True) for item in side} for side in (training, held_out)]
    assert asked[0].isdisjoint(asked[1])
    # no held-out sum is trained on in another order
    terms = [{tuple(sorted(item.terms)) for item in side} for side in (training, held_out)]
    assert terms[0].isdisjoint(terms[1])
    assert len(set(training)) + len(set(held_out)) == num_items
    assert len(held_out) >= 200  # what their configs evaluate


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
