"""An environment of several turns: guess a hidden number by the answers "higher" and "lower"."""

from __future__ import annotations

from typing import Any


class GuessingGame:
    """One game, which is lost after `max_guesses` wrong guesses."""

    def __init__(self, max_guesses: int = 3) -> None:
        self._max_guesses = max_guesses

    def reset(self, target: int, low: int, high: int, **columns: Any) -> str:
        """Begin the game of a row; the text becomes the prompt."""
        self._target, self._left, self._found = target, self._max_guesses, False
        return f"Guess my number from {low} to {high}."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: Your guess.

        Returns:
            higher, lower or correct.
        """
        if self.is_done():
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
