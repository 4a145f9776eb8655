"""Make the model and the data of the guessing game.

The good way halves what is left, the lazy one insists on a number. Ranges go from a number that ends in 1 to one that ends in 7: a
model this small learns to search by the last digit and to copy the others. Whole ranges are held out.

    from 231 to 237:  ->   234 -> higher, 236 -> lower, 235 -> correct           or   232 -> higher, 232 -> higher, 232 -> higher

    python -m examples.game.prepare     # once: model and data in .cache/quickstart/game/seed_0
    grpo-async train examples/game/train.yaml
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from examples.game.guessing_game import GuessingGame
from grpo_async.quickstart.prepare import prepare
from grpo_async.quickstart.tasks import Demonstration, Task, Turn, WarmupRecipe
from grpo_async.tools import Tool

RANGE_SIZE, NUM_RANGES = 7, 99  # 11 to 17, 21 to 27, ... 991 to 997
MAX_GUESSES = 3  # 2**3 - 1 = 7: halving always finds the number


@dataclass(frozen=True, slots=True)
class Game:
    """A number and the range it is in."""

    low: int
    target: int

    @property
    def high(self) -> int:
        return self.low + RANGE_SIZE - 1


def games() -> Iterator[Game]:
    for low in range(11, 10 * NUM_RANGES + 2, 10):
        yield from (Game(low, target) for target in range(low, low + RANGE_SIZE))


def _row(game: Game) -> dict[str, Any]:
    prompt = [{"role": "user", "content": ""}]  # the environment's reset says it all
    return {"prompt": prompt, "low": game.low, "high": game.high, "target": game.target}


def _halve(game: Game, rng: random.Random) -> Demonstration:
    low, high = game.low, game.high

    def search(answers: Sequence[str]) -> int:
        """Halves what is left: 231 to 237, "higher" after 234: next 235 to 237."""
        nonlocal low, high
        if answers:
            low, high = ((low + high) // 2 + 1, high) if answers[-1] == "higher" else (low, (low + high) // 2 - 1)
        return (low + high) // 2

    return _played(game, search)


def _insist(game: Game, rng: random.Random) -> Demonstration:
    number = rng.randint(game.low, game.high)
    return _played(game, lambda answers: number)


def _played(item: Game, guess: Callable[[Sequence[str]], int]) -> Demonstration:
    """The whole game, against the environment itself; `guess` gets its answers so far."""
    game, answers = GuessingGame(max_guesses=MAX_GUESSES), list[str]()
    prompt = game.reset(low=item.low, high=item.high, target=item.target)
    turns: list[Turn] = []
    while not game.is_done():
        number = guess(answers)
        answers.append(game.guess(number))
        turns.append(Turn.calling("guess", {"number": number}, None if game.is_done() else answers[-1]))
    return Demonstration(prompt=prompt or "", turns=tuple(turns))


TASK = Task(
    name="game",
    recipe=WarmupRecipe(num_steps=400, batch_size=10),
    items=games,
    key=lambda game: f"from {game.low}",
    row=_row,
    good=_halve,
    lazy=_insist,
    tools=lambda: [Tool.from_function(GuessingGame().guess).schema],
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data")
    prepare(task=TASK, seed=parser.parse_args().seed)
