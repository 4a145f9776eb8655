"""Environments that the tests name by reference. `events` and the gates are reset by the fixture of conftest."""

from __future__ import annotations

import asyncio
import functools
import signal
import sqlite3
import threading
import time
from typing import Any

events: list[str] = []
gate = threading.Event()
entered = threading.Event()
refuse = threading.Event()  # no instance can be made


def clear() -> None:
    events.clear()
    for event in (gate, entered, refuse):
        event.clear()


class Full:
    """Has all that an environment may have, and much that is no tool."""

    limit = 3

    def __init__(self) -> None:
        if refuse.is_set():
            raise ConnectionError("too many sessions")
        events.append("made")
        self.helper = len
        self.row: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        if name == "is_done":
            events.append("looked up is_done")
        return super().__getattribute__(name)

    def reset(self, **row: Any) -> str:
        """Begins."""
        self.row = row
        return "Begin."

    def move(self, direction: str) -> str:
        """Moves.

        Args:
            direction: Where to.
        """
        return f"moved {direction}"

    def stay(self) -> str:
        """Does nothing."""
        return "stayed"

    @functools.lru_cache  # noqa: B019
    def look(self) -> str:
        """Looks around."""
        return "a wall"

    @classmethod
    def rules(cls) -> str:
        """Says the rules."""
        return f"{cls.limit} moves"

    @staticmethod
    def score(text: str) -> int:
        return len(text)

    @property
    def board(self) -> str:
        events.append("board was read")
        raise RuntimeError("there is no board before reset")

    def _draw(self) -> str:
        return "hidden"

    def is_done(self) -> bool:
        return False

    def get_reward(self) -> Any:
        return self.row.get("reward", 1.0)

    def close(self) -> None:
        events.append("closed")


class Gated:
    """Its calls wait for the gate."""

    def __init__(self) -> None:
        events.append("made")

    def reset(self, **row: Any) -> None:
        events.append("reset")

    def wait(self, number: int = 0) -> str:
        """Waits.

        Args:
            number: Any.
        """
        events.append(f"begin {number}")
        entered.set()
        if not gate.wait(timeout=30):
            raise TimeoutError("the test forgot the gate")
        events.append(f"end {number}")
        return "waited"

    async def wait_async(self, number: int = 0) -> str:
        """Waits on the loop.

        Args:
            number: Any.
        """
        events.append(f"begin {number}")
        while not gate.is_set():
            await asyncio.sleep(0.001)
        events.append(f"end {number}")
        return "waited"

    def close(self) -> None:
        events.append("closed")


class Database:
    """Bound to the thread that made it."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", check_same_thread=True)
        self.connection.execute("create table notes (text)")

    def reset(self, text: str, seed: int) -> str:
        self.connection.execute("delete from notes")
        self.connection.execute("insert into notes values (?)", (text,))
        return f"seed {seed}"

    def notes(self) -> list[str]:
        """Reads the notes."""
        return [text for (text,) in self.connection.execute("select text from notes")]

    async def is_done(self) -> bool:
        return True

    def get_reward(self) -> float:
        return float(len(self.notes()))

    def close(self) -> None:
        self.connection.close()


class NoReset:
    def nod(self) -> str:
        return "nodded"


class Bare:
    """Nothing but reset: the episode is one text, judged from outside."""

    def reset(self, **row: Any) -> Any:
        return row.get("text")


class Timed:
    """Limits its calls with signal.alarm, as an example of TRL does, so it needs the main thread."""

    def __init__(self, start: int = 0) -> None:
        self.total, self._seconds = start, 5

    def _add(self, number: int) -> int:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(self._seconds)
        try:
            self.total += number
        finally:
            signal.alarm(0)
        return self.total

    def reset(self, **row: Any) -> str:
        return f"From {self._add(1)}."

    async def add(self, number: int) -> list[int]:
        """Adds.

        Args:
            number: How much; 0 raises, a negative number hangs.
        """
        if number < 0:
            time.sleep(60)  # noqa: ASYNC251
        if not number:
            raise ValueError("nothing to add")
        return [self._add(number)]

    def get_reward(self) -> float:
        return float(self.total)
