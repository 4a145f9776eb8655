"""Rows that functions make, good and bad."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

_draws = random.Random(7)


def sums(num_rows: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for _ in range(num_rows):
        left, right = rng.randrange(100), rng.randrange(100)
        yield {"prompt": f"{left}+{right}=", "answer": str(left + right), "odds": float("nan")}


def endless() -> Iterator[dict[str, Any]]:
    """Without end as far as its reader may go; raises beyond that, so that a reader that does not stop does not fill the memory."""
    for number in itertools.count():
        if number > 1000:
            raise RuntimeError("read far too far")
        yield {"prompt": f"count to {number}"}


def as_list() -> list[dict[str, Any]]:
    return [{"prompt": "a"}, {"prompt": "b"}]


def raises_at_two() -> Iterator[dict[str, Any]]:
    yield {"prompt": "a"}
    yield {"prompt": "b"}
    raise ZeroDivisionError("no third one")


def unseeded() -> Iterator[dict[str, Any]]:
    while True:
        yield {"prompt": f"number {_draws.random()}"}
