"""The quickstart's task: sums and differences of four numbers from 1 to 5, such as "3 + 4 - 2 + 1 =".

Only expressions whose every intermediate result is a single digit, 0 to 9: that leaves 2012 of 5000, and a task that a
model of 0.37 million parameters learns to work out in half a minute of warm-up. A hash decides which are held out, about
one in eight, and expressions that only reorder the same signed terms fall on the same side, so that no held-out sum is
trained on in other words. The split is the same for every seed; the seed only shuffles the rows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NUM_TERMS = 4
LARGEST_TERM = 5
LARGEST_RESULT = 9
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True, slots=True)
class ChainSum:
    """Signed terms, the first positive: (3, 4, -2, 1) is "3 + 4 - 2 + 1"."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """`(3, 4, -2, 1)` -> `3 + 4 - 2 + 1 =`"""
        first, *rest = self.terms
        return " ".join([str(first), *(_signed(term) for term in rest), "="])

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def steps(self) -> list[str]:
        """One line per intermediate result: `(3, 4, -2, 1)` -> `["3 + 4 = 7", "7 - 2 = 5", "5 + 1 = 6"]`."""
        totals = list(itertools.accumulate(self.terms))
        return [
            f"{before} {_signed(term)} = {after}"
            for (before, after), term in zip(itertools.pairwise(totals), self.terms[1:], strict=True)
        ]

    @property
    def is_held_out(self) -> bool:
        """Decided by a hash of the sorted terms, so every order of the same terms is on the same side."""
        digest = hashlib.sha256(repr(sorted(self.terms)).encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def all_sums() -> list[ChainSum]:
    """Every expression of the task, in a fixed order."""
    positive = range(1, LARGEST_TERM + 1)
    signed = [*positive, *(-number for number in positive)]
    every = itertools.product(positive, *[signed] * (NUM_TERMS - 1))
    return [ChainSum(terms) for terms in every if all(0 <= r <= LARGEST_RESULT for r in itertools.accumulate(terms))]


def training_sums() -> list[ChainSum]:
    return [item for item in all_sums() if not item.is_held_out]


def held_out_sums() -> list[ChainSum]:
    return [item for item in all_sums() if item.is_held_out]


def write_rows(path: Path, sums: Iterable[ChainSum], *, seed: int) -> None:
    """Write the sums, shuffled by the seed, as JSON lines `{"prompt": [{"role": "user", ...}], "answer": "5"}`."""
    rng = random.Random(seed)
    # sorted by rng.random(): the one generator whose sequence Python promises to keep; shuffle() may change
    shuffled = sorted(((rng.random(), item) for item in sums), key=lambda pair: pair[0])
    with path.open("w", encoding="utf-8") as file:
        for _, item in shuffled:
            row = {"prompt": [{"role": "user", "content": item.prompt}], "answer": str(item.answer)}
            file.write(json.dumps(row) + "\n")


def _signed(term: int) -> str:
    """`4` -> `+ 4`, `-2` -> `- 2`"""
    return f"{'+' if term > 0 else '-'} {abs(term)}"
