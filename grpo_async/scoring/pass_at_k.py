"""How often a policy solves a prompt, from several completions of it. Pure.

pass@k (Chen et al., arXiv 2107.03374): the chance that at least one of k completions passes; see `pass_at_k`.
majority@k (self-consistency, Wang et al., arXiv 2203.11171): the chance that the most frequent answer of k completions passes;
see `majority_at_k`. mean@k (also avg@k) is the mean over k completions; its expectation is the same for every k.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Vote:
    """One completion. `answer` None: none can be read in it, so it has no vote."""

    answer: str | None
    passed: bool


def pass_at_k(num_completions: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k (arXiv 2107.03374, equation 1): the fraction of the subsets of k that have one that passes,

        1 - C(n - c, k) / C(n, k)        n = num_completions, c = num_passed

    4 completions of which 1 passes: k = 1: 1 - 3/4 = 0.25; k = 2: 1 - 3/6 = 0.5; k = 4: 1 - 0/1 = 1. The plain estimate
    1 - (1 - c/n)^k would say 0.4375 for k = 2.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not 0 <= num_passed <= num_completions or not 1 <= k <= num_completions:
        raise ValueError(f"pass@{k} of {num_completions} completions with {num_passed} that pass is not defined")
    return 1.0 - math.comb(num_completions - num_passed, k) / math.comb(num_completions, k)


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Unbiased estimate of majority@k: the mean over the disjoint blocks of k votes, in their order, of

        fraction of the completions with the block's most frequent answer that pass; several such answers: the mean of theirs

    which is the expectation when a tie is broken at random. A block in which no answer can be read does not pass. Votes that fill
    no block (5 votes, k = 2: the last one) are left out.

    Answers 7 7 9 7, where 7 is right: k = 4: 7 wins with 3 of 4: 1. k = 2: blocks (7 7): 1, (9 7): a tie, 0.5; mean 0.75.
    k = 1: 3 of 4 pass: 0.75.

    Raises:
        ValueError: not 1 <= k <= len(votes).
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"majority@{k} of {len(votes)} completions is not defined")
    return fmean(_winner_passes(votes[begin : begin + k]) for begin in range(0, len(votes) - k + 1, k))


def _winner_passes(votes: Sequence[Vote]) -> float:
    by_answer: dict[str, list[bool]] = defaultdict(list)
    for vote in votes:
        if vote.answer is not None:
            by_answer[vote.answer].append(vote.passed)
    if not by_answer:
        return 0.0
    most = max(len(passed) for passed in by_answer.values())
    return fmean(fmean(map(float, passed)) for passed in by_answer.values() if len(passed) == most)
