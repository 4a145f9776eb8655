"""What users bring from TRL: the shapes of its example scripts, written anew."""

from __future__ import annotations

import random
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def query(sql: str) -> list[tuple[Any, ...]]:
    """Run a query.

    Args:
        sql: The query.
    """
    with time_limit(5), sqlite3.connect(":memory:") as connection:
        return connection.execute(sql).fetchall()


def evidence(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """The tool's rows support the answer: 2, they contradict it: -1.5; a text in their place is an error: -2."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        results = [turn["content"] for turn in completion if turn["role"] == "tool"]
        calls = [call["function"]["arguments"]["sql"] for turn in completion for call in turn.get("tool_calls", ())]
        rows = [row for result in results if isinstance(result, list) for row in result]
        if any(isinstance(result, str) for result in results):
            rewards.append(-2.0)
        else:
            rewards.append((2.0 if bool(rows) == (wanted == "yes") else -1.5) + 0.1 * len(calls))
    return rewards


class Board:
    def reset(self, **kwargs: Any) -> str:
        self.cells, self.score, self.done = [[0] * 2 for _ in range(2)], 0.0, False
        return f"score={self.score}"

    def move(self, direction: str) -> str:
        """Play one move.

        Args:
            direction: One of "up", "down".
        """
        if self.done:
            raise ValueError("Game over.")
        self.cells[0][0] += 1
        self.score += 2.0 if direction == "up" else 1.0
        self.done = self.score >= 3.0
        return f"score={self.score}"


def score(environments: list[Any], **kwargs: Any) -> list[float]:
    return [environment.score + environment.cells[0][0] for environment in environments]


class Two:
    """Two games behind one class, chosen by a column."""

    def __init__(self) -> None:
        self.active, self.reward = "", 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.active, self.reward = kwargs.get("env", "first"), 0.0
        return "Guess." if self.active == "first" else None

    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: The word.
        """
        if self.active != "first":
            raise ValueError("only in the first game")
        self.reward = 1.0
        return "GGY"


def first(environments: list[Any], **kwargs: Any) -> list[float | None]:
    return [each.reward if each.active == "first" else None for each in environments]


def second(environments: list[Any], **kwargs: Any) -> list[float | None]:
    return [0.5 if each.active == "second" else None for each in environments]


class Owning:
    """Makes its own task."""

    def reset(self, **kwargs: Any) -> str:
        assert "environment" not in kwargs  # a control field, as in TRL
        self.moves = 0
        return f"Compute the {random.randint(1, 20)}th number."

    def compute(self, code: str) -> str:
        """Compute.

        Args:
            code: The source.
        """
        self.moves += 1
        return "ok"

    async def get_reward(self) -> float:
        return float(self.moves)
