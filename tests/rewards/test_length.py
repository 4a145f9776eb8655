from __future__ import annotations

import pytest

from grpo_async.rewards.length import cosine_length, soft_overlong


def _ids(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def test_soft_overlong_falls_linearly_within_the_cache() -> None:
    # M = 100, C = 20: up to 80 nothing; (80 - 85) / 20 = -0.25; (80 - 90) / 20 = -0.5; (80 - 100) / 20 = -1; beyond: -1
    scores = soft_overlong(_ids(0, 80, 85, 90, 100, 130), max_completion_tokens=100, cache_tokens=20)
    assert scores == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("cache_tokens", [0, 101])
def test_soft_overlong_refuses_a_cache_outside_the_completion(cache_tokens: int) -> None:
    with pytest.raises(ValueError, match="cache_tokens"):
        soft_overlong(_ids(1), max_completion_tokens=100, cache_tokens=cache_tokens)


def test_cosine_length_of_correct_and_wrong_completions() -> None:
    # M = 300. L = 0: (1 + cos 0) / 2 = 1, so r_short. L = 150: (1 + cos(pi / 2)) / 2 = 0.5, the middle of both.
    # L = 100: cos(pi / 3) = 0.5, so 0.75: correct 0.5 + 0.5 x 0.75 = 0.875, wrong -0.5 - 0.5 x 0.75 = -0.875.
    answers = ["7"] * 8
    completions = ["7"] * 4 + ["8"] * 3 + ["7"]
    scores = cosine_length(
        completions,
        _ids(0, 100, 150, 300, 0, 100, 150, 301),
        max_completion_tokens=300,
        correctness="number",
        answer=answers,
    )
    assert scores == pytest.approx([1.0, 0.875, 0.75, -1.0, -1.0, -0.875, -0.75, -1.0])


def test_cosine_length_can_judge_by_math_and_by_text() -> None:
    ids = _ids(0)
    assert cosine_length([r"\boxed{0.5}"], ids, max_completion_tokens=10, solution=[r"$\frac{1}{2}$"]) == [1.0]
    assert cosine_length(["ab"], ids, max_completion_tokens=10, correctness="exact", answer=["b"]) == [-1.0]
