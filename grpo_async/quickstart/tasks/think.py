r"""*think*: sums and differences of four numbers from 1 to 5, such as "3 + 4 - 2 + 1 =", worked out step by step or guessed.

Only expressions whose every intermediate result is a single digit, 0 to 9: that leaves 2012 of 5000, and a task that a
model of 0.37 million parameters learns to work out in half a minute of warm-up. About one in eight is held out.

    thinks   3 + 4 - 2 + 1 =   ->   <think>3 + 4 = 7\n7 - 2 = 5\n5 + 1 = 6</think>6
    guesses  3 + 4 - 2 + 1 =   ->   <think></think>9                              (the answer +- 0..9)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from grpo_async.quickstart.demonstration import Demonstration
from grpo_async.quickstart.sums import MAX_GUESS_ERROR, ChainSum, guess, thinking
from grpo_async.quickstart.tasks.base import Task, WarmupRecipe

NUM_TERMS = 4
LARGEST_TERM = 5
LARGEST_RESULT = 9


def all_sums() -> list[ChainSum]:
    """Every expression of the task, in a fixed order."""
    positive = range(1, LARGEST_TERM + 1)
    signed = [*positive, *(-number for number in positive)]
    every = itertools.product(positive, *[signed] * (NUM_TERMS - 1))
    return [
        ChainSum.of(*terms) for terms in every if all(0 <= r <= LARGEST_RESULT for r in itertools.accumulate(terms))
    ]


class ThinkTask(Task[ChainSum]):
    name = "think"
    recipe = WarmupRecipe()

    def training_items(self) -> Sequence[ChainSum]:
        return [item for item in all_sums() if not item.is_held_out]

    def held_out_items(self) -> Sequence[ChainSum]:
        return [item for item in all_sums() if item.is_held_out]

    def row(self, item: ChainSum) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": _prompt(item)}], "answer": str(item.answer)}

    def good(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return Demonstration.of(_prompt(item), thinking(item))

    def lazy(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return Demonstration.of(_prompt(item), guess(item, rng.randint(-MAX_GUESS_ERROR, MAX_GUESS_ERROR)))


def _prompt(item: ChainSum) -> str:
    """`3 + 4 - 2 + 1 =`"""
    return f"{item.text} ="
