"""Environments for the tests of whole rollouts."""

from __future__ import annotations


class Counter:
    """Counts what it is given; done at its goal."""

    def __init__(self) -> None:
        self.total = 0
        self.goal = 0

    def reset(self, goal: int = 2, **row: object) -> str:
        self.total, self.goal = 0, goal
        return f" Count to {goal}."

    def add(self, a: int) -> str:
        """
        Add to the counter.

        Args:
            a: how much
        """
        self.total += a + 1
        return f"sum {self.total}"

    def is_done(self) -> bool:
        return self.total >= self.goal

    def get_reward(self) -> float:
        return float(self.total)


class Broken:
    """Its reset fails."""

    def reset(self, **row: object) -> None:
        raise ValueError("no board")

    def add(self, a: int) -> str:
        """
        Add.

        Args:
            a: how much
        """
        return "added"
