"""The task `tool`: sums that a calculator works out."""

from __future__ import annotations

import random

from grpo_async.config.interaction_sections import ToolSection
from grpo_async.quickstart.tasks.tool import ToolTask
from grpo_async.tools import load_tools

TASK = ToolTask()
TRAINING, HELD_OUT = TASK.training_items(), TASK.held_out_items()


def test_the_sums_have_three_numbers_of_one_or_two_digits_and_the_sides_share_none() -> None:
    numbers = {number for item in TRAINING for number in item.numbers}
    assert numbers == set(range(1, 100))
    assert {len(item.numbers) for item in TRAINING} == {3}
    assert (len(TRAINING), len(HELD_OUT)) == (4000, 400)
    assert not {tuple(sorted(i.terms)) for i in TRAINING} & {tuple(sorted(i.terms)) for i in HELD_OUT}


def test_the_good_way_asks_the_calculator_and_repeats_its_answer() -> None:
    for item in TRAINING[:50]:
        call, final = TASK.good(item, random.Random(0)).turns
        assert call.calls[0].name == "calculator"
        assert call.calls[0].arguments == {"expression": item.text}
        assert call.results == (final.text,) == (TASK.row(item)["answer"],)


def test_the_lazy_way_answers_at_once_within_nine_of_the_answer() -> None:
    rng, item = random.Random(0), TRAINING[3]
    texts = [TASK.lazy(item, rng).turns for _ in range(400)]
    assert {int(turn.text) for (turn,) in texts} == {item.answer + error for error in range(-9, 10)}


def test_the_model_is_shown_the_tool_that_the_config_offers() -> None:
    (tool,) = load_tools([ToolSection(function="grpo_async.tools.calculator:calculator")])
    assert TASK.tools() == [tool.schema]
