"""Tools that the tests name by reference: good ones, then bad ones."""

from __future__ import annotations

import functools
import signal
import time
from typing import TYPE_CHECKING, Any, Literal

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

    def shout(self, name: str) -> str:
        """Greets loudly.

        Args:
            name: Whom.
        """
        return f"{self.word} {name}".upper()


class AsyncGreeter:
    async def __call__(self, name: str) -> str:
        """Greets somebody, later.

        Args:
            name: Whom.
        """
        return f"Later, {name}"


greeter = Greeter("Hello")
shout = greeter.shout
async_greeter = AsyncGreeter()
number = 3


def undocumented(a: int) -> int:
    return a


def half_documented(a: int, b, c: str) -> int:  # type: ignore[no-untyped-def]
    """Documents one of three.

    Args:
        a: This one.
    """
    return a


def by_position(a: int, /) -> int:
    """Takes it by position.

    Args:
        a: This one.
    """
    return a


def takes_anything(*args: int, **kwargs: int) -> int:
    """Takes anything."""
    return 0


def unresolvable(a: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Takes a type that is not there.

    Args:
        a: This one.
    """
    return 0


def _other_multiply() -> Any:
    def multiply(a: int) -> int:
        """Multiplies by one.

        Args:
            a: The integer.
        """
        return a

    return multiply


other_multiply = _other_multiply()


def alarmed(number: int) -> list[int]:
    """Doubles, within a time limit of its own, which needs the main thread.

    Args:
        number: What to double; 0 raises, a negative number hangs.
    """
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(5)
    try:
        if number < 0:
            time.sleep(60)
        return [2 * number * number // number]
    finally:
        signal.alarm(0)
