"""The task `reasoning_gym` asks as the package does, and its good way satisfies the package's own scorer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from grpo_async.config.data_sections import ReasoningGymSource
from grpo_async.config.loader import load_config
from grpo_async.data import load_rows
from grpo_async.quickstart.tasks.reasoning_gym import ReasoningGymTask, all_sums, question
from grpo_async.rewards.reasoning_gym import task_score

TASK = ReasoningGymTask()
CONFIG = load_config(Path(__file__).parents[2] / "configs" / "reasoning-gym.yaml")


@pytest.mark.slow  # importing reasoning_gym takes seconds
def test_the_package_asks_what_the_model_was_warmed_up_on_and_scores_the_good_way_as_right() -> None:
    source = CONFIG.data.train
    assert isinstance(source, ReasoningGymSource)
    rows = load_rows(source.model_copy(update={"size": 40}))
    known = {question(item): item for item in all_sums()}
    assert {row["prompt"] for row in rows} <= known.keys()
    assert source.system_prompt is None  # plain text, as the demonstrations are
    items = [known[row["prompt"]] for row in rows]
    assert [row["answer"] for row in rows] == [str(item.answer) for item in items]
    good = [TASK.good(item, random.Random(0)).turns[0].text for item in items]
    tasks, data = [row["task"] for row in rows], [row["task_data"] for row in rows]
    assert task_score(good, tasks, data, binarize=True) == [1.0] * 40
    wrong = [f"<think></think>{item.answer + 1}" for item in items]
    assert task_score(wrong, tasks, data, binarize=True) == [0.0] * 40


def test_the_split_covers_every_sum_once() -> None:
    training, held_out = TASK.training_items(), TASK.held_out_items()
    assert len(training) + len(held_out) == len({item.text for item in all_sums()}) == 4000  # 10^3 numbers x 2^2 signs
    assert not {item.text for item in training} & {item.text for item in held_out}


def test_a_row_and_a_demonstration_say_the_same() -> None:
    item = all_sums()[1234]
    shown = TASK.good(item, random.Random(0))
    assert TASK.row(item)["prompt"] == shown.prompt
    assert not shown.is_conversational
    assert not TASK.lazy(item, random.Random(0)).is_conversational
    assert shown.turns[0].text.endswith(f"</think>{item.answer}")
