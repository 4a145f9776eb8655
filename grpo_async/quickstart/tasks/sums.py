r"""Three tasks of sums and differences such as "3 + 4 - 2 + 1", each answered the good way, or by a guess: the answer +- 0..9.

*think*: four numbers from 1 to 5, worked out step by step. Only expressions whose every intermediate result is a single digit, 0 to
9: that leaves 2012 of 5000, and a task that a model of 0.37 million parameters learns to work out in half a minute of warmup.

    3 + 4 - 2 + 1 =   ->   <think>3 + 4 = 7\n7 - 2 = 5\n5 + 1 = 6</think>6       or   <think></think>9

*tool*: three numbers of one or two digits, with a calculator at hand; of millions of such sums a fixed sample, the same for every
seed.

    12 + 7 - 30 =     ->   <tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 7 - 30"}}\n</tool_call>
                           and, after the result: -11                            or   -6

*reasoning_gym*: the task `chain_sum` of the package reasoning_gym, three numbers from 0 to 9; 4000 sums. The rows of a run come
from the package (`data.train.type: reasoning_gym`), plain text without a chat template. The prompts are written here without it, so
that the base model can be made where it is not installed; a test compares them.

    ...arithmetic problem: 4 - 1 - 7 =   ->   <think>4 - 1 = 3\n3 - 7 = -4</think>-4      or   <think></think>2
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.config.sections import ToolSection
from grpo_async.quickstart.demonstration import Demonstration, Turn, calling_turn
from grpo_async.quickstart.tasks.base import Task, WarmupRecipe
from grpo_async.tools import load_tools
from grpo_async.tools.calculator import calculator

MAX_GUESS_ERROR = 9


@dataclass(frozen=True, slots=True)
class ChainSum:
    """Numbers and the operators between them: ((3, 4, 2), ("+", "-")) is "3 + 4 - 2"."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    @classmethod
    def of(cls, *terms: int) -> ChainSum:
        """From signed terms, the first positive: `of(3, 4, -2)` is "3 + 4 - 2"."""
        return cls(tuple(abs(term) for term in terms), tuple("+" if term > 0 else "-" for term in terms[1:]))

    @property
    def terms(self) -> tuple[int, ...]:
        """Signed: "3 + 4 - 2" -> (3, 4, -2)."""
        first, *rest = self.numbers
        return (first, *(n if o == "+" else -n for o, n in zip(self.operators, rest, strict=True)))

    @property
    def text(self) -> str:
        """`3 + 4 - 2`"""
        first, *rest = self.numbers
        return " ".join([str(first), *(f"{o} {n}" for o, n in zip(self.operators, rest, strict=True))])

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def steps(self) -> list[str]:
        """One line per intermediate result: "3 + 4 - 2 + 1" -> `["3 + 4 = 7", "7 - 2 = 5", "5 + 1 = 6"]`."""
        totals = itertools.pairwise(itertools.accumulate(self.terms))
        return [
            f"{before} {operator} {number} = {after}"
            for (before, after), operator, number in zip(totals, self.operators, self.numbers[1:], strict=True)
        ]


class _SumTask(Task[ChainSum]):
    is_conversational = True

    def key(self, item: ChainSum) -> str:
        """The sorted terms: no held-out sum is trained on in another order."""
        return repr(sorted(item.terms))

    def question(self, item: ChainSum) -> str:
        return f"{item.text} ="

    def row(self, item: ChainSum) -> dict[str, Any]:
        question = self.question(item)
        prompt = [{"role": "user", "content": question}] if self.is_conversational else question
        return {"prompt": prompt, "answer": str(item.answer)}

    def good(self, item: ChainSum, rng: random.Random) -> Demonstration:
        steps = "\n".join(item.steps)
        return self._shown(item, f"<think>{steps}</think>{item.answer}")

    def lazy(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return self._shown(item, f"<think></think>{_guess(item, rng)}")

    def _shown(self, item: ChainSum, text: str) -> Demonstration:
        return Demonstration.of(self.question(item), text, is_conversational=self.is_conversational)


def _guess(item: ChainSum, rng: random.Random) -> int:
    return item.answer + rng.randint(-MAX_GUESS_ERROR, MAX_GUESS_ERROR)


class ThinkTask(_SumTask):
    name = "think"
    recipe = WarmupRecipe()

    def all_items(self) -> Sequence[ChainSum]:
        positive = range(1, 6)
        signed = [*positive, *(-number for number in positive)]
        every = itertools.product(positive, *[signed] * 3)
        return [ChainSum.of(*terms) for terms in every if all(0 <= r <= 9 for r in itertools.accumulate(terms))]


class ReasoningGymTask(_SumTask):
    name = "reasoning_gym"
    recipe = WarmupRecipe(num_steps=850, batch_size=16, lr=3e-3)
    is_conversational = False

    def all_items(self) -> Sequence[ChainSum]:
        every = itertools.product(itertools.product(range(10), repeat=3), itertools.product("+-", repeat=2))
        return [ChainSum(numbers, operators) for numbers, operators in every]

    def question(self, item: ChainSum) -> str:
        return f"State the final answer to the following arithmetic problem: {item.text} ="


class ToolTask(_SumTask):
    name = "tool"
    recipe = WarmupRecipe(num_steps=600, batch_size=10, lr=3e-3, good_fraction_after=0.2)

    def all_items(self) -> Sequence[ChainSum]:
        """The first 4000 different sums to train on, and the first 400 that are held out."""
        found: dict[bool, dict[ChainSum, None]] = {False: {}, True: {}}
        for item in _endless_sums():
            is_held_out = self.is_held_out(item)
            side = found[is_held_out]
            if len(side) < (400 if is_held_out else 4000):
                side[item] = None
            if (len(found[False]), len(found[True])) == (4000, 400):
                break
        return [*found[False], *found[True]]

    def good(self, item: ChainSum, rng: random.Random) -> Demonstration:
        call = calling_turn("calculator", {"expression": item.text}, calculator(item.text))
        return Demonstration(prompt=self.question(item), turns=(call, Turn(text=str(item.answer))))

    def lazy(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return self._shown(item, str(_guess(item, rng)))

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in load_tools([ToolSection(function="grpo_async.tools.calculator:calculator")])]


def _endless_sums() -> Iterator[ChainSum]:
    """One-digit and two-digit numbers equally often; only rng.random(), whose sequence Python promises to keep."""
    rng = random.Random(0)
    while True:
        numbers = []
        for _ in range(3):
            low, high = (1, 9) if rng.random() < 0.5 else (10, 99)
            numbers.append(low + int(rng.random() * (high - low + 1)))
        operators = ["+" if rng.random() < 0.5 else "-" for _ in range(2)]
        yield ChainSum(tuple(numbers), tuple(operators))
