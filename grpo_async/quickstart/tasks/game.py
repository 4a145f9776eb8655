"""*game*: find a number in a range of seven with three guesses, told "higher" or "lower" after each.

    searches   from 231 to 237: 234 -> higher, 236 -> lower, 235 -> correct      always in the middle of what is left
    insists    from 231 to 237: 232 -> higher, 232 -> higher, 232 -> higher      any number, and again the same

The environment is the shipped `GuessingGame`, its own text is the prompt. Ranges go from a number that ends in 1 to one that ends
in 7: a model this small learns to search by the last digit and to copy the others, which holds in ranges that it has never
seen. So whole ranges are held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.envs.guessing_game import GuessingGame
from grpo_async.quickstart.demonstration import Demonstration, Turn, calling_turn
from grpo_async.quickstart.sums import is_held_out
from grpo_async.quickstart.tasks.base import Task, WarmupRecipe
from grpo_async.tools import Tool

RANGE_SIZE = 7
MAX_GUESSES = 3  # 2**3 - 1 = 7: halving always finds the number
NUM_RANGES = 99  # 11 to 17, 21 to 27, ... 991 to 997


@dataclass(frozen=True, slots=True)
class Game:
    """A number and the range it is in."""

    low: int
    target: int

    @property
    def high(self) -> int:
        return self.low + RANGE_SIZE - 1


class GameTask(Task[Game]):
    name = "game"
    recipe = WarmupRecipe(num_steps=400, batch_size=10)

    def training_items(self) -> Sequence[Game]:
        return [game for game in _all_games() if not _is_held_out(game)]

    def held_out_items(self) -> Sequence[Game]:
        return [game for game in _all_games() if _is_held_out(game)]

    def row(self, item: Game) -> dict[str, Any]:
        prompt = [{"role": "user", "content": ""}]  # the environment's reset says it all
        return {"prompt": prompt, "low": item.low, "high": item.high, "target": item.target}

    def good(self, item: Game, rng: random.Random) -> Demonstration:
        return _played(item, _Search(item.low, item.high))

    def lazy(self, item: Game, rng: random.Random) -> Demonstration:
        return _played(item, _Insistence(rng.randint(item.low, item.high)))

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [Tool.from_function(GuessingGame().guess).schema]


@dataclass(slots=True)
class _Search:
    """Halves what is left: 231 to 237, told "higher" after 234, goes on with 235 to 237."""

    low: int
    high: int

    @property
    def guess(self) -> int:
        return (self.low + self.high) // 2

    def hear(self, answer: str) -> None:
        if answer == "higher":
            self.low = self.guess + 1
        else:
            self.high = self.guess - 1


@dataclass(slots=True)
class _Insistence:
    """Says the same again."""

    guess: int

    def hear(self, answer: str) -> None:
        pass


def _played(item: Game, player: _Search | _Insistence) -> Demonstration:
    """The whole game, against the environment itself."""
    game = GuessingGame(max_guesses=MAX_GUESSES)
    prompt = game.reset(low=item.low, high=item.high, target=item.target)
    turns: list[Turn] = []
    while not game.is_done():
        guess = player.guess
        answer = game.guess(guess)
        player.hear(answer)
        turns.append(calling_turn("guess", {"number": guess}, None if game.is_done() else answer))
    return Demonstration(prompt=prompt or "", turns=tuple(turns))


def _all_games() -> Iterator[Game]:
    for number in range(1, NUM_RANGES + 1):
        low = 10 * number + 1
        for target in range(low, low + RANGE_SIZE):
            yield Game(low, target)


def _is_held_out(game: Game) -> bool:
    return is_held_out(f"from {game.low}")
