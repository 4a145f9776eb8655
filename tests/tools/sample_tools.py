"""Tools that the tests name by reference: good ones, then bad ones."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Literal

from tests.envs import trl_style_environment

if TYPE_CHECKING:
    from decimal import Decimal

multiply, async_add = trl_style_environment.multiply, trl_style_environment.async_add


def search(query: str, index: object, limit: int = 3, order: Literal["asc", "desc"] = "asc") -> Decimal:
    """Searches an index.

    Args:
        query: What to look for.
        limit: Most results.
        order: Of the results.
    """
    return f"{query} in {index}, {limit}, {order}"  # type: ignore[return-value]


search_books = functools.partial(search, index="books")


class Greeter:
    """Not what the model shall read."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, name: str) -> str:
        """Greets somebody.

        Args:
            name: Whom.
        """
        return f"{self.word} {name}"


class AsyncGreeter:
    async def __call__(self, name: str) -> str:
        """Greets somebody, later.

        Args:
            name: Whom.
        """
        return f"Later, {name}"


greeter = Greeter("Hello")
async_greeter = AsyncGreeter()


def undocumented(a: int) -> int:
    return a


def process_of(number: int) -> list[int]:
    """Where it runs.

    Args:
        number: 0 raises.
    """
    return [os.getpid() * number // number]
