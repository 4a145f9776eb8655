r"""*tool*: sums and differences of three numbers of one or two digits, such as "12 + 7 - 30 =", with a calculator at hand.

    calls    12 + 7 - 30 =   ->   <tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 7 - 30"}}\n</tool_call>
                                  and, after the result: -11
    guesses  12 + 7 - 30 =   ->   -6                            (the answer +- 0..9)

There are millions of such sums; a fixed sample of them is used, the same for every seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_async.config.interaction_sections import ToolSection
from grpo_async.quickstart.demonstration import Demonstration, Turn, calling_turn
from grpo_async.quickstart.sums import MAX_GUESS_ERROR, ChainSum
from grpo_async.quickstart.tasks.base import Task, WarmupRecipe
from grpo_async.tools import load_tools
from grpo_async.tools.calculator import calculator

NUM_TERMS = 3
NUM_TRAINING = 4000
NUM_HELD_OUT = 400


class ToolTask(Task[ChainSum]):
    name = "tool"
    recipe = WarmupRecipe(num_steps=600, batch_size=10, lr=3e-3, good_share_after=0.2)

    def training_items(self) -> Sequence[ChainSum]:
        return _sampled(NUM_TRAINING, held_out=False)

    def held_out_items(self) -> Sequence[ChainSum]:
        return _sampled(NUM_HELD_OUT, held_out=True)

    def row(self, item: ChainSum) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": _prompt(item)}], "answer": str(item.answer)}

    def good(self, item: ChainSum, rng: random.Random) -> Demonstration:
        call = calling_turn("calculator", {"expression": item.text}, calculator(item.text))
        return Demonstration(prompt=_prompt(item), turns=(call, Turn(text=str(item.answer))))

    def lazy(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return Demonstration.of(_prompt(item), str(item.answer + rng.randint(-MAX_GUESS_ERROR, MAX_GUESS_ERROR)))

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in load_tools([ToolSection(function="grpo_async.tools.calculator:calculator")])]


def _prompt(item: ChainSum) -> str:
    """`12 + 7 - 30 =`"""
    return f"{item.text} ="


def _sampled(num: int, *, held_out: bool) -> list[ChainSum]:
    """The first `num` different sums of that side of the split."""
    found: dict[ChainSum, None] = {}
    for item in _endless_sums():
        if item.is_held_out is held_out:
            found[item] = None
        if len(found) == num:
            break
    return list(found)


def _endless_sums() -> Iterator[ChainSum]:
    """One-digit and two-digit numbers equally often; only rng.random(), whose sequence Python promises to keep."""
    rng = random.Random(0)
    while True:
        numbers = []
        for _ in range(NUM_TERMS):
            low, high = (1, 9) if rng.random() < 0.5 else (10, 99)
            numbers.append(low + int(rng.random() * (high - low + 1)))
        operators = ["+" if rng.random() < 0.5 else "-" for _ in range(NUM_TERMS - 1)]
        yield ChainSum(tuple(numbers), tuple(operators))
