r"""*reasoning_gym*: the task `chain_sum` of the package reasoning_gym, three numbers from 0 to 9.

    thinks   ...arithmetic problem: 4 - 1 - 7 =   ->   <think>4 - 1 = 3\n3 - 7 = -4</think>-4
    guesses  ...arithmetic problem: 4 - 1 - 7 =   ->   <think></think>2                        (the answer +- 0..9)

The rows of a run come from the package (`data.train.type: reasoning_gym`), plain text without a chat template. The prompts are
written here without it, so that the base model can be made where it is not installed; a test compares them. There are 4000 such
sums, and the warm-up sees seven eighths of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from grpo_async.quickstart.demonstration import Demonstration
from grpo_async.quickstart.sums import MAX_GUESS_ERROR, ChainSum, guess, thinking
from grpo_async.quickstart.tasks.base import Task, WarmupRecipe

NUM_TERMS = 3


class ReasoningGymTask(Task[ChainSum]):
    name = "reasoning_gym"
    recipe = WarmupRecipe(num_steps=850, batch_size=16, lr=3e-3)

    def training_items(self) -> Sequence[ChainSum]:
        return [item for item in all_sums() if not item.is_held_out]

    def held_out_items(self) -> Sequence[ChainSum]:
        return [item for item in all_sums() if item.is_held_out]

    def row(self, item: ChainSum) -> dict[str, Any]:
        return {"prompt": question(item), "answer": str(item.answer)}

    def good(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return Demonstration.of(question(item), thinking(item), is_conversational=False)

    def lazy(self, item: ChainSum, rng: random.Random) -> Demonstration:
        error = rng.randint(-MAX_GUESS_ERROR, MAX_GUESS_ERROR)
        return Demonstration.of(question(item), guess(item, error), is_conversational=False)


def all_sums() -> list[ChainSum]:
    """Every expression of the task, in a fixed order."""
    return [
        ChainSum(numbers, operators)
        for numbers in itertools.product(range(10), repeat=NUM_TERMS)
        for operators in itertools.product("+-", repeat=NUM_TERMS - 1)
    ]


def question(item: ChainSum) -> str:
    """As reasoning_gym asks it."""
    return f"State the final answer to the following arithmetic problem: {item.text} ="
