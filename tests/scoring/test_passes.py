"""pass@k and majority@k: against numbers by hand, against brute force, and for being unbiased."""

from __future__ import annotations

from itertools import combinations

import pytest

from grpo_async.scoring.passes import Vote, majority_at_k, pass_at_k, powers_up_to


def test_pass_at_k_by_hand() -> None:
    """4 completions, 1 passes. k = 2: of the C(4, 2) = 6 pairs, C(3, 2) = 3 lack it: 1 - 3/6."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 4, 1) == 1.0
    assert pass_at_k(200, 1, 100) == 0.5  # 1 - C(199, 100) / C(200, 100) = 100 / 200


def test_pass_at_k_is_the_share_of_the_subsets_in_which_one_passes() -> None:
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


def test_majority_at_k_by_hand() -> None:
    """7 7 9 7, 7 is right. k = 2: (7 7) -> 1; (9 7) is a tie -> 0.5."""
    votes = [Vote(answer, answer == "7") for answer in ("7", "7", "9", "7")]
    assert [majority_at_k(votes, k) for k in (1, 2, 4)] == [0.75, 0.75, 1.0]


def test_a_majority_for_the_wrong_answer_fails_although_one_passes() -> None:
    votes = [Vote("9", False), Vote("7", True), Vote("9", False)]
    assert majority_at_k(votes, 3) == 0.0
    assert pass_at_k(3, 1, 3) == 1.0


def test_completions_without_an_answer_have_no_vote_and_votes_that_fill_no_block_are_left_out() -> None:
    none, right, wrong = Vote(None, True), Vote("7", True), Vote("9", False)
    assert majority_at_k([none, none, right], 3) == 1.0
    assert majority_at_k([none, none], 2) == 0.0
    assert majority_at_k([right, right, wrong], 2) == 1.0
    with pytest.raises(ValueError, match="not defined"):
        majority_at_k([right], 2)


def test_an_answer_that_passes_in_some_completions_only_counts_by_their_share() -> None:
    """Same answer, one of the two without the required form: 0.5."""
    assert majority_at_k([Vote("7", True), Vote("7", False), Vote("9", True)], 3) == 0.5


def test_the_reported_k_are_powers_of_two_and_all_samples() -> None:
    assert [powers_up_to(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]
