"""What a task of the quickstart gives: its items, how one is asked, and two ways to answer it.

The *good* way earns the reward, the *lazy* way mostly does not. The warmup teaches both, the good one thoroughly but as the
rarer habit, so that reinforcement learning has something to amplify.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from grpo_async.quickstart.demonstration import Demonstration


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


Item = TypeVar("Item")


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
            turns = (
                f"assistant\n{turn.text}\n" + "".join(f"user\n{r}\n" for r in turn.results) for turn in shown.turns
            )
            yield f"system\nuser\n{shown.prompt}\n{''.join(turns)}"


def _call_form(tool: Mapping[str, Any]) -> str:
    """How the chat template lists a tool: {"name": "guess", "arguments": {"number": "integer"}}."""
    function = tool["function"]
    types = {name: schema["type"] for name, schema in function["parameters"]["properties"].items()}
    return json.dumps({"name": function["name"], "arguments": types})
