"""pass@k and majority@k: against numbers by hand, against brute force, and for being unbiased."""

from __future__ import annotations

from itertools import combinations

import pytest

from grpo_async.config.sections import powers_up_to
from grpo_async.scoring.pass_at_k import Vote, majority_at_k, pass_at_k


def test_pass_at_k_is_the_fraction_of_the_subsets_in_which_one_passes() -> None:
    """By hand: 4 completions, 1 passes. k = 2: of the C(4, 2) = 6 pairs, C(3, 2) = 3 lack it: 1 - 3/6."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(200, 1, 100) == 0.5  # 1 - C(199, 100) / C(200, 100) = 100 / 200
    for n in range(1, 8):
        for c in range(n + 1):
            passed = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(passed, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5), (0, 0, 1)])
def test_pass_at_k_of_what_is_not_there_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)
    with pytest.raises(ValueError, match="not defined"):
        majority_at_k([_RIGHT], 2)


_NONE, _RIGHT, _WRONG = Vote(None, True), Vote("7", True), Vote("9", False)


@pytest.mark.parametrize(
    ("votes", "k", "majority"),
    [
        # 7 7 9 7, 7 is right. k = 2: (7 7) -> 1; (9 7) is a tie -> 0.5
        *(([_RIGHT, _RIGHT, _WRONG, _RIGHT], k, majority) for k, majority in ((1, 0.75), (2, 0.75), (4, 1.0))),
        ([_WRONG, _RIGHT, _WRONG], 3, 0.0),
        ([_NONE, _NONE, _RIGHT], 3, 1.0),  # without an answer there is no vote
        ([_NONE, _NONE], 2, 0.0),
        ([_RIGHT, _RIGHT, _WRONG], 2, 1.0),  # the last one fills no block
        ([_RIGHT, Vote("7", False), Vote("9", True)], 3, 0.5),  # one of two equal answers lacks the required form
    ],
)
def test_majority_at_k_by_hand(votes: list[Vote], k: int, majority: float) -> None:
    assert majority_at_k(votes, k) == majority


def test_the_reported_k_are_powers_of_two_and_all_samples() -> None:
    assert [powers_up_to(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]
