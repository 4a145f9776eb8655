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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.config.sections import ToolSection
from grpo_async.records import ToolCall
from grpo_async.tools import load_tools
from grpo_async.tools.calculator import calculator

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task, of items of any type. The seed of a prepared folder only orders the rows.

    Args:
        items: gives every item, in a fixed order.
        key: items with the same key are on the same side of the split.
        row: a line of the data: `prompt`, and the columns that reward functions and environments get.
        good: the way that is right but becomes rare.
        lazy: the habit that reinforcement learning has to overcome.
        tools: gives the JSON schemas of the tools that a rollout offers the model.
    """

    name: str
    recipe: WarmupRecipe
    items: Callable[[], Iterable[Any]]
    key: Callable[[Any], str]
    row: Callable[[Any], dict[str, Any]]
    good: Callable[[Any, random.Random], Demonstration]
    lazy: Callable[[Any, random.Random], Demonstration]
    tools: Callable[[], Sequence[Mapping[str, Any]]] = tuple

    def training_items(self) -> Sequence[Any]:
        return [item for item in self.items() if not is_held_out(self.key(item))]

    def held_out_items(self) -> Sequence[Any]:
        return [item for item in self.items() if is_held_out(self.key(item))]

    def vocabulary(self) -> Iterator[str]:
        """Text that the tokenizer learns its merges from."""
        for tool in self.tools():  # as the template lists it: {"name": "guess", "arguments": {"number": "integer"}}
            function = tool["function"]
            types = {name: schema["type"] for name, schema in function["parameters"]["properties"].items()}
            yield json.dumps({"name": function["name"], "arguments": types})
        for item in self.training_items():
            shown = self.good(item, random.Random(0))
            yield f"system\nuser\n{shown.prompt}\n" + "".join(
                f"assistant\n{turn.text}\n" + (f"user\n{turn.result}\n" if turn.result else "") for turn in shown.turns
            )


def is_held_out(key: str) -> bool:
    """About one key in eight, the same ones everywhere and forever."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 8 == 0


# ---- sums: signed terms, (3, 4, -2) is "3 + 4 - 2" ----

Sum = tuple[int, ...]


def text_of(terms: Sum) -> str:
    first, *rest = terms
    return " ".join([str(first), *(f"{'+' if term > 0 else '-'} {abs(term)}" for term in rest)])


def steps_of(terms: Sum) -> list[str]:
    """One line per intermediate result: "3 + 4 - 2 + 1" -> `["3 + 4 = 7", "7 - 2 = 5", "5 + 1 = 6"]`."""
    totals = list(itertools.accumulate(terms))
    return [f"{text_of((before, term))} = {before + term}" for before, term in zip(totals, terms[1:], strict=False)]


def _key(terms: Sum) -> str:
    """The sorted terms: no held-out sum is trained on in another order."""
    return repr(sorted(terms))


def _shown(terms: Sum, text: str) -> Demonstration:
    return Demonstration.of(f"{text_of(terms)} =", text)


def _row(terms: Sum) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{text_of(terms)} ="}], "answer": str(sum(terms))}


def _guess(terms: Sum, rng: random.Random) -> int:
    return sum(terms) + rng.randint(-MAX_GUESS_ERROR, MAX_GUESS_ERROR)


def _chains() -> Iterator[Sum]:
    positive = range(1, 6)
    signed = [*positive, *(-number for number in positive)]
    for terms in itertools.product(positive, *[signed] * 3):
        if all(0 <= result <= 9 for result in itertools.accumulate(terms)):
            yield terms


def _think(terms: Sum, rng: random.Random) -> Demonstration:
    return _shown(terms, "<think>" + "\n".join(steps_of(terms)) + f"</think>{sum(terms)}")


def _large_sums() -> Iterable[Sum]:
    """4500 different sums of one-digit and two-digit numbers, which are equally often."""
    rng = random.Random(0)  # only rng.random(), whose sequence Python promises to keep
    found: dict[Sum, None] = {}
    while len(found) < 4500:
        numbers = [1 + int(rng.random() * 9) if rng.random() < 0.5 else 10 + int(rng.random() * 90) for _ in range(3)]
        signs = [1, *(1 if rng.random() < 0.5 else -1 for _ in range(2))]
        found[tuple(number * sign for number, sign in zip(numbers, signs, strict=True))] = None
    return found


def _ask_calculator(terms: Sum, rng: random.Random) -> Demonstration:
    text = text_of(terms)
    call = Turn.calling("calculator", {"expression": text}, calculator(text))
    return Demonstration(prompt=f"{text} =", turns=(call, Turn(text=str(sum(terms)))))


THINK = Task(
    name="think",
    recipe=WarmupRecipe(),
    items=_chains,
    key=_key,
    row=_row,
    good=_think,
    lazy=lambda terms, rng: _shown(terms, f"<think></think>{_guess(terms, rng)}"),
)
TOOL = Task(
    name="tool",
    recipe=WarmupRecipe(num_steps=600, batch_size=10, lr=3e-3, good_fraction_after=0.2),
    items=_large_sums,
    key=_key,
    row=_row,
    good=_ask_calculator,
    lazy=lambda terms, rng: _shown(terms, str(_guess(terms, rng))),
    tools=lambda: [
        tool.schema for tool in load_tools([ToolSection(function="grpo_async.tools.calculator:calculator")])
    ],
)
TASKS = {task.name: task for task in (THINK, TOOL)}
"""The tasks by the names that `prepare-quickstart --task` takes."""
