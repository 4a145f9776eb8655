"""Sums and differences such as "3 + 4 - 2 + 1", their answers, the steps to them, and which of them are held out."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

HELD_OUT_ONE_IN = 8
MAX_GUESS_ERROR = 9  # a lazy guess is the answer +- 0..9


@dataclass(frozen=True, slots=True)
class ChainSum:
    """Numbers and the operators between them: ((3, 4, 2), ("+", "-")) is "3 + 4 - 2"."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    @classmethod
    def of(cls, *terms: int) -> ChainSum:
        """From signed terms, the first positive: `of(3, 4, -2)` is "3 + 4 - 2"."""
        return cls(tuple(abs(term) for term in terms), tuple("+" if term > 0 else "-" for term in terms[1:]))

    @property
    def terms(self) -> tuple[int, ...]:
        """Signed: "3 + 4 - 2" -> (3, 4, -2)."""
        first, *rest = self.numbers
        return (first, *(n if o == "+" else -n for o, n in zip(self.operators, rest, strict=True)))

    @property
    def text(self) -> str:
        """`3 + 4 - 2`"""
        first, *rest = self.numbers
        return " ".join([str(first), *(f"{o} {n}" for o, n in zip(self.operators, rest, strict=True))])

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def steps(self) -> list[str]:
        """One line per intermediate result: "3 + 4 - 2 + 1" -> `["3 + 4 = 7", "7 - 2 = 5", "5 + 1 = 6"]`."""
        totals = list(itertools.accumulate(self.terms))
        return [
            f"{before} {operator} {number} = {after}"
            for (before, after), operator, number in zip(
                itertools.pairwise(totals), self.operators, self.numbers[1:], strict=True
            )
        ]

    @property
    def is_held_out(self) -> bool:
        """Decided by a hash of the sorted terms, so every order of the same terms is on the same side: no held-out sum is
        trained on in other words."""
        return is_held_out(repr(sorted(self.terms)))


def is_held_out(key: str) -> bool:
    """About one key in eight, the same ones everywhere and for ever."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def thinking(item: ChainSum) -> str:
    """The good way: the steps, then the answer."""
    return "<think>" + "\n".join(item.steps) + f"</think>{item.answer}"


def guess(item: ChainSum, error: int) -> str:
    """The lazy way: no thinking, and a number near the answer."""
    return f"<think></think>{item.answer + error}"
