"""A game of several turns: guess a hidden number by the answers "higher" and "lower". `grpo_async.envs.guessing_game:GuessingGame`.

The row says which number: the columns `target`, or `seed`, from which it is drawn; `low` and `high` override the arguments of the
constructor. So every rollout of a group plays the same game. Nothing else is needed: with `data.train.type: environment` the game's
own text is the prompt.

Worked example, low 1, high 10, target 7: guess 5 -> "higher", 8 -> "lower", 7 -> "correct"; reward 1.0.
"""

from __future__ import annotations

import random
from typing import Any


class GuessingGame:
    """One game.

    Args:
        low: smallest possible number.
        high: largest possible number.
        max_guesses: the game is lost after this many wrong guesses.
    """

    def __init__(self, low: int = 1, high: int = 10, max_guesses: int = 5) -> None:
        if low > high or max_guesses < 1:
            raise ValueError(f"a game needs low <= high and max_guesses >= 1, got {low}, {high} and {max_guesses}")
        self._low, self._high, self._max_guesses = low, high, max_guesses
        self._target: int | None = None
        self._left = 0
        self._found = False

    def reset(
        self,
        target: int | str | None = None,
        seed: int | str | None = None,
        low: int | str | None = None,
        high: int | str | None = None,
        **columns: Any,
    ) -> str:
        """Begin a game; the columns of a CSV file are text, so numbers may be that too."""
        first = self._low if low is None else int(low)
        last = self._high if high is None else int(high)
        if target is not None:
            self._target = int(target)
        elif seed is not None:
            self._target = random.Random(f"guessing game {int(seed)}").randint(first, last)
        else:
            raise ValueError("the row has neither a column `target` nor `seed`, so there is no number to guess")
        if not first <= self._target <= last:
            raise ValueError(f"target {self._target} is not in {first} to {last}")
        self._left, self._found = self._max_guesses, False
        return f"Guess my number from {first} to {last}."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: Your guess.

        Returns:
            higher, lower or correct.
        """
        if self.is_done() or self._target is None:
            raise ValueError("the game is over")
        self._left -= 1
        self._found = number == self._target
        if self._found:
            return "correct"
        return "higher" if number < self._target else "lower"

    def is_done(self) -> bool:
        """Found, or out of guesses."""
        return self._found or self._left <= 0

    def get_reward(self) -> float:
        """1 for a found number, else 0."""
        return float(self._found)
