"""A base model for smolagents: the tiny model of the tool task, warmed up on sums as that library asks them.

The library tells the model of earlier calls in words of its own, in a new prompt for each step. The words are taken from a rollout
of the library with given answers, with another sum in the place of its own; so each step is a demonstration by itself:

    step 1   system, "New task:\\n12 + 7 - 30 ="                                   -> calculator, or a guess as the final answer
    step 2   the same, "Calling tools:\\n[...]", "Observation:\\n-11"               -> final_answer("-11")

As in every task of the quickstart, the good way is known but rare: first a guess, mostly. Reinforcement learning has to turn that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_async.quickstart.demonstration import Demonstration, calling_turn
from grpo_async.quickstart.tasks.base import WarmupRecipe
from grpo_async.quickstart.tasks.sums import ChainSum, ToolTask, _guess
from grpo_async.records import TaggedMessage

CALCULATOR, FINAL_ANSWER = "calculator", "final_answer"


class SmolagentsTask(ToolTask):
    """See the module's docstring.

    Args:
        first, second: messages of the two prompts of a rollout that solved `shown`.
        tools: as the library offers them.
    """

    name = "smolagents"
    recipe = WarmupRecipe(num_steps=680, batch_size=12, lr=3e-3, good_fraction_after=1 / 3)

    def __init__(
        self,
        first: Sequence[TaggedMessage],
        second: Sequence[TaggedMessage],
        *,
        shown: ChainSum,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        self._prompts = first, second
        self._shown_item = shown
        self._tools = tools

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._tools

    def good(self, item: ChainSum, rng: random.Random) -> Demonstration:
        """One of the two steps. Of the last demonstrations a third are good, and so 1 of 5 first steps asks the calculator."""
        if rng.random() < 0.5:
            return self._step(item, 0, CALCULATOR, {"expression": item.text})
        return self._step(item, 1, FINAL_ANSWER, {"answer": str(item.answer)})

    def lazy(self, item: ChainSum, rng: random.Random) -> Demonstration:
        return self._step(item, 0, FINAL_ANSWER, {"answer": str(_guess(item, rng))})

    def vocabulary(self) -> Iterator[str]:
        for item in self.training_items():
            for step, name, arguments in (
                (0, CALCULATOR, {"expression": item.text}),
                (1, FINAL_ANSWER, {"answer": str(item.answer)}),
            ):
                shown = self._step(item, step, name, arguments)
                yield "\n".join([*(each.content for each in shown.before), shown.prompt, shown.turns[0].text])

    def _step(self, item: ChainSum, step: int, name: str, arguments: Mapping[str, Any]) -> Demonstration:
        *before, asked = (replace(each, content=self._in_words(each.content, item)) for each in self._prompts[step])
        assert asked.role == "user"
        turn = calling_turn(name, arguments, None)
        return Demonstration(prompt=asked.content, before=tuple(before), turns=(turn,))

    def _in_words(self, text: str, item: ChainSum) -> str:
        """What the library says, of another sum."""
        shown = self._shown_item
        text = text.replace(shown.text, item.text)
        result = f"Observation:\n{shown.answer}"
        return f"Observation:\n{item.answer}" if text == result else text
