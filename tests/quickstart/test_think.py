"""The sums of the task `think`, and their split."""

from __future__ import annotations

import random

from grpo_async.quickstart.tasks.think import ThinkTask, all_sums

TASK = ThinkTask()
TRAINING, HELD_OUT = TASK.training_items(), TASK.held_out_items()


def test_every_intermediate_result_is_one_digit() -> None:
    assert {int(step.rpartition("= ")[2]) for item in all_sums() for step in item.steps} == set(range(10))


def test_prompt_and_answer_agree_for_every_expression() -> None:
    for item in all_sums():
        row = TASK.row(item)
        assert str(eval(row["prompt"][0]["content"].removesuffix("="))) == row["answer"]  # digits and signs, our own


def test_the_split_covers_every_expression_once_and_holds_out_enough() -> None:
    assert not {item.text for item in TRAINING} & {item.text for item in HELD_OUT}
    assert len(TRAINING) + len(HELD_OUT) == len(all_sums()) == 2012
    assert len(HELD_OUT) >= 200  # what configs/quickstart.yaml evaluates; one in eight is 251


def test_no_held_out_sum_is_a_reordered_training_sum() -> None:
    assert not {tuple(sorted(i.terms)) for i in TRAINING} & {tuple(sorted(i.terms)) for i in HELD_OUT}


def test_the_good_way_thinks_and_the_lazy_one_guesses_near_the_answer() -> None:
    rng, item = random.Random(0), TRAINING[100]
    assert TASK.good(item, rng).turns[0].text.startswith(f"<think>{item.steps[0]}\n")
    guesses = {TASK.lazy(item, rng).turns[0].text for _ in range(400)}
    assert guesses == {f"<think></think>{item.answer + error}" for error in range(-9, 10)}
