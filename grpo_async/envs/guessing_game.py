"""A game of several turns: guess a hidden number by the answers "higher" and "lower". `grpo_async.envs.guessing_game:GuessingGame`.

The row says which number: the columns `target`, or `seed`, from which it is drawn; `low`, `high` and `max_guesses` override the
arguments of the constructor. So every rollout of a group plays the same game. Nothing else is needed: with
`data.train.type: environment` the game's own text is the prompt.

Worked example, low 1, high 10, target 7: guess 5 -> "higher", 8 -> "lower", 7 -> "correct"; 3 guesses, reward 1.0;
with guess_cost 0.1 it is 1 - 0.1 * 2 = 0.8.
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
        guess_cost: taken off the reward for every guess after the first; the reward of a found number stays >= 0.
        text: the prompt, with {low}, {high} and {max_guesses}; "" where the data has a prompt that says it all.
    """

    def __init__(
        self,
        low: int = 1,
        high: int = 10,
        max_guesses: int = 5,
        guess_cost: float = 0.0,
        text: str = "Guess my number from {low} to {high}.",
    ) -> None:
        if low > high or max_guesses < 1 or guess_cost < 0:
            raise ValueError(
                f"a game needs low <= high, max_guesses >= 1 and guess_cost >= 0, got low {low}, high {high}, "
                f"max_guesses {max_guesses}, guess_cost {guess_cost}"
            )
        text.format(low=low, high=high, max_guesses=max_guesses)  # a wrong placeholder is found now
        self._low, self._high, self._max_guesses, self._guess_cost, self._text = (
            low,
            high,
            max_guesses,
            guess_cost,
            text,
        )
        self._target: int | None = None
        self._num_guesses = 0
        self._left = 0
        self._found = False

    def reset(
        self,
        target: int | str | None = None,
        seed: int | str | None = None,
        low: int | str | None = None,
        high: int | str | None = None,
        max_guesses: int | str | None = None,
        **columns: Any,
    ) -> str | None:
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
        self._left = self._max_guesses if max_guesses is None else int(max_guesses)
        self._num_guesses = 0
        self._found = False
        return self._text.format(low=first, high=last, max_guesses=self._left) or None

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: Your guess.

        Returns:
            higher, lower or correct.
        """
        if self.is_done() or self._target is None:
            raise ValueError("the game is over")
        self._num_guesses += 1
        self._left -= 1
        self._found = number == self._target
        if self._found:
            return "correct"
        return "higher" if number < self._target else "lower"

    def is_done(self) -> bool:
        """Found, or out of guesses."""
        return self._found or self._left <= 0

    def get_reward(self) -> float:
        """1 for a found number, less what the guesses cost; else 0."""
        if not self._found:
            return 0.0
        return max(0.0, 1.0 - self._guess_cost * (self._num_guesses - 1))

    def close(self) -> None:
        """The game is over."""
        self._left = 0
