"""The demonstrations and the numbers of the warm-up."""

from __future__ import annotations

import random

import pytest

from grpo_async.quickstart.task import ChainSum, training_sums
from grpo_async.quickstart.tokenizer import train_tokenizer
from grpo_async.quickstart.warmup import WarmupRecipe, demonstration, encode_batch, thinking

ITEM = ChainSum((3, 4, -2, 1))


def test_thinking_shows_each_step_and_then_the_answer() -> None:
    assert thinking(ITEM) == "<think>3 + 4 = 7\n7 - 2 = 5\n5 + 1 = 6</think>6"


def test_at_first_everything_thinks_and_in_the_end_about_a_third() -> None:
    recipe, rng = WarmupRecipe(num_steps=100), random.Random(0)
    early = [demonstration(ITEM, step, recipe, rng) for step in range(87) for _ in range(20)]
    late = [demonstration(ITEM, step, recipe, rng) for step in range(88, 100) for _ in range(200)]
    assert set(early) == {thinking(ITEM)}
    assert late.count(thinking(ITEM)) / len(late) == pytest.approx(0.3, abs=0.03)
    assert {text for text in late if text != thinking(ITEM)} == {
        f"<think></think>{n}" for n in range(-3, 16)
    }  # 6 - 9 to 6 + 9


def test_the_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    recipe = WarmupRecipe(num_steps=120, lr_warmup_steps=20)
    assert recipe.lr_factor(0) == pytest.approx(1 / 20)
    assert recipe.lr_factor(19) == recipe.lr_factor(20) == pytest.approx(1.0)
    assert recipe.lr_factor(70) == pytest.approx(0.55)  # half way: 0.1 + 0.9 x (1 + cos(pi / 2)) / 2
    assert recipe.lr_factor(120) == pytest.approx(0.1)


def test_only_assistant_tokens_are_learned_the_end_of_the_turn_included() -> None:
    tokenizer = train_tokenizer(item.prompt for item in training_sums()[:50])
    input_ids, labels = encode_batch(tokenizer, [("1 + 1 =", "2"), ("1 + 1 =", "<think>1</think>2")])
    assert input_ids.shape == labels.shape
    learned = [[int(token) for token in row[row != -100]] for row in labels]
    assert [tokenizer.decode(row) for row in learned] == ["2<|im_end|>", "<think>1</think>2<|im_end|>"]
    assert tokenizer.decode(input_ids[1]).endswith("assistant\n<think>1</think>2<|im_end|>")
    assert input_ids[0, -1] == tokenizer.pad_token_id
