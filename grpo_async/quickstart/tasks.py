r"""The tasks of the quickstart: items, how one is asked, and two ways to answer it.

The *good* way earns the reward, the *lazy* way mostly does not. The warmup teaches both, the good one thoroughly but as the
rarer habit, so that reinforcement learning has something to amplify.

Two tasks of sums and differences such as "3 + 4 - 2 + 1", each answered the good way, or by a guess: the answer +- 0..9.

*think*: four numbers from 1 to 5, worked out step by step. Only expressions whose every intermediate result is a single digit, 0 to
9: that leaves 2012 of 5000, and a task that a model of 0.37 million parameters learns to work out in half a minute of warmup.

    3 + 4 - 2 + 1 =   ->   <think>3 + 4 = 7\n7 - 2 = 5\n5 + 1 = 6</think>6       or   <think></think>9

*tool*: three numbers of one or two digits, with a calculator at hand; of millions of such sums a fixed sample, the same for every
seed.

    12 + 7 - 30 =     ->   <tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 7 - 30"}}\n</tool_call>
                           and, after the result: -11                            or   -6
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from grpo_async.config.sections import ToolSection
from grpo_async.records import ToolCall
from grpo_async.tools import load_tools
from grpo_async.tools.calculator import calculator

Item = TypeVar("Item")
MAX_GUESS_ERROR = 9  # of the lazy answer to a sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy writes in one turn; its call and what that is answered with. A call without a result ends the rollout."""

    text: str
    call: ToolCall | None = None
    result: str | None = None

    @classmethod
    def calling(cls, name: str, arguments: Mapping[str, Any], result: str | None) -> Turn:
        r"""A call: `<tool_call>\n{"name": "calc", "arguments": {"expression": "1 + 2"}}\n</tool_call>`."""
        text = "<tool_call>\n" + json.dumps({"name": name, "arguments": dict(arguments)}) + "\n</tool_call>"
        return cls(text=text, call=ToolCall(tool_call_id="call00000", name=name, arguments=arguments), result=result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation: what the user says and the turns that follow."""

    prompt: str
    turns: tuple[Turn, ...]

    @classmethod
    def of(cls, prompt: str, text: str) -> Demonstration:
        """A single turn without calls."""
        return cls(prompt=prompt, turns=(Turn(text=text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRecipe:
    """The numbers of a warmup. The marker of a prepared folder holds them, so that other numbers make the folder again."""

    num_steps: int = 280
    batch_size: int = 32
    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    lr_warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    good_only_fraction: float = 0.875
    """Fraction of the steps, from the first, in which every demonstration is of the good way."""
    good_fraction_after: float = 0.3
    """Fraction of the demonstrations in the steps after those that are good; the others are lazy."""

    def lr_factor(self, step: int) -> float:
        """Linear warmup, then cosine from 1 to `min_lr_ratio` at the last step."""
        if step < self.lr_warmup_steps:
            return (step + 1) / self.lr_warmup_steps
        progress = (step - self.lr_warmup_steps) / max(1, self.num_steps - self.lr_warmup_steps)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0


class Task(ABC, Generic[Item]):
    """One task. Everything it gives is the same on every call; the seed of a prepared folder only orders the rows."""

    name: ClassVar[str]
    recipe: ClassVar[WarmupRecipe]

    @abstractmethod
    def all_items(self) -> Iterable[Item]:
        """Every item, in a fixed order."""

    @abstractmethod
    def key(self, item: Item) -> str:
        """Items with the same key are on the same side of the split."""

    def is_held_out(self, item: Item) -> bool:
        """About one key in eight, the same ones everywhere and forever."""
        digest = hashlib.sha256(self.key(item).encode()).digest()
        return int.from_bytes(digest[:8], "big") % 8 == 0

    def training_items(self) -> Sequence[Item]:
        return [item for item in self.all_items() if not self.is_held_out(item)]

    def held_out_items(self) -> Sequence[Item]:
        """What is evaluated on."""
        return [item for item in self.all_items() if self.is_held_out(item)]

    @abstractmethod
    def row(self, item: Item) -> dict[str, Any]:
        """A line of the data: `prompt`, and the columns that reward functions and environments get."""

    @abstractmethod
    def good(self, item: Item, rng: random.Random) -> Demonstration:
        """The way that is right but becomes rare."""

    @abstractmethod
    def lazy(self, item: Item, rng: random.Random) -> Demonstration:
        """The habit that reinforcement learning has to overcome."""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools that a rollout offers the model."""
        return ()

    def vocabulary(self) -> Iterator[str]:
        """Text that the tokenizer learns its merges from."""
        yield from map(_call_form, self.tools())
        for item in self.training_items():
            shown = self.good(item, random.Random(0))
            yield f"system\nuser\n{shown.prompt}\n" + "".join(
                f"assistant\n{turn.text}\n" + (f"user\n{turn.result}\n" if turn.result else "") for turn in shown.turns
            )


def _call_form(tool: Mapping[str, Any]) -> str:
    """How the chat template lists a tool: {"name": "guess", "arguments": {"number": "integer"}}."""
    function = tool["function"]
    types = {name: schema["type"] for name, schema in function["parameters"]["properties"].items()}
    return json.dumps({"name": function["name"], "arguments": types})


# ---- sums ----


@dataclass(frozen=True, slots=True)
class ChainSum:
    """Numbers and the operators between them: ((3, 4, 2), ("+", "-")) is "3 + 4 - 2"."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    @classmethod
    def of(cls, *terms: int) -> ChainSum:
        """The sum of signed terms, the first positive: `of(3, 4, -2)` is "3 + 4 - 2"."""
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
    def key(self, item: ChainSum) -> str:
        """The sorted terms: no held-out sum is trained on in another order."""
        return repr(sorted(item.terms))

    def question(self, item: ChainSum) -> str:
        return f"{item.text} ="

    def row(self, item: ChainSum) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": self.question(item)}], "answer": str(item.answer)}

    def good(self, item: ChainSum, rng: random.Random) -> Demonstration:
        steps = "\n".join(item.steps)
        return self._shown(item, f"<think>{steps}</think>{item.answer}")

    def lazy(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return self._shown(item, f"<think></think>{_guess(item, rng)}")

    def _shown(self, item: ChainSum, text: str) -> Demonstration:
        return Demonstration.of(self.question(item), text)


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
        call = Turn.calling("calculator", {"expression": item.text}, calculator(item.text))
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


TASKS: dict[str, Task[Any]] = {task.name: task for task in (ThinkTask(), ToolTask())}
"""The tasks by the names that `prepare-quickstart --task` takes."""
