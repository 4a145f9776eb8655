"""Environments for the tests of whole rollouts."""

from __future__ import annotations

import threading


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

        Returns:
            The sum.
        """
        self.total += a + 1
        return f"sum {self.total}"

    def is_done(self) -> bool:
        return self.total >= self.goal

    def get_reward(self) -> float:
        return float(self.total)


class Broken:
    """Its reset fails for odd seeds; otherwise `is_done` does."""

    def reset(self, seed: int = 0, **row: object) -> None:
        if seed % 2:
            raise ValueError("odd seed")

    def add(self, a: int) -> str:
        """
        Add.

        Args:
            a: how much
        """
        return "added"

    def is_done(self) -> bool:
        raise RuntimeError("nobody knows")


class Waiting:
    """Its tool waits until the test lets it go."""

    go_on = threading.Event()

    def reset(self, **row: object) -> None:
        return None

    def add(self, a: int) -> str:
        """
        Wait.

        Args:
            a: for what
        """
        Waiting.go_on.wait(30.0)
        return "done"
