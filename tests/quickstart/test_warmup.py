"""When the good way is shown and when the lazy one, and the numbers of the warm-up."""

from __future__ import annotations

import random

import pytest

from grpo_async.quickstart.sums import ChainSum, thinking
from grpo_async.quickstart.tasks.base import WarmupRecipe
from grpo_async.quickstart.tasks.think import ThinkTask
from grpo_async.quickstart.warmup import demonstration

ITEM = ChainSum.of(3, 4, -2, 1)


def test_at_first_everything_is_good_and_in_the_end_about_a_third() -> None:
    recipe, rng, task = WarmupRecipe(num_steps=100), random.Random(0), ThinkTask()

    def shown(steps: range, times: int) -> list[str]:
        return [demonstration(task, ITEM, step, recipe, rng).turns[0].text for step in steps for _ in range(times)]

    early, late = shown(range(87), 20), shown(range(88, 100), 200)  # 0.875 x 100 = 87.5
    assert set(early) == {thinking(ITEM)}
    assert late.count(thinking(ITEM)) / len(late) == pytest.approx(0.3, abs=0.03)
    assert {text for text in late if text != thinking(ITEM)} == {f"<think></think>{n}" for n in range(-3, 16)}  # 6 +- 9


def test_the_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    recipe = WarmupRecipe(num_steps=120, lr_warmup_steps=20)
    assert recipe.lr_factor(0) == pytest.approx(1 / 20)
    assert recipe.lr_factor(19) == recipe.lr_factor(20) == pytest.approx(1.0)
    assert recipe.lr_factor(70) == pytest.approx(0.55)  # half way: 0.1 + 0.9 x (1 + cos(pi / 2)) / 2
    assert recipe.lr_factor(120) == pytest.approx(0.1)
