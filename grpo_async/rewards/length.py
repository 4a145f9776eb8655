"""Rewards for the length of a completion, in tokens. L is the number of tokens of one completion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_async.rewards import text
from grpo_async.rewards.call import checked_by, whole_number

_KINDS = ("math", "number", "exact")


def _check_overlong(arguments: Mapping[str, Any]) -> None:
    longest = whole_number(arguments, "max_completion_tokens", 1)
    cache = whole_number(arguments, "cache_tokens", 1)
    if "max_completion_tokens" in arguments and cache > longest:
        raise ValueError(f"cache_tokens: {cache} must be in 1..max_completion_tokens ({longest})")


def _check_cosine(arguments: Mapping[str, Any]) -> None:
    whole_number(arguments, "max_completion_tokens", 1)
    kind = arguments.get("correctness", "math")
    if kind not in _KINDS:
        raise ValueError(f"correctness: {kind!r} is not one of {_KINDS}")


@checked_by(_check_overlong)
def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_completion_tokens: int, cache_tokens: int, **_: Any
) -> list[float | None]:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), with M = max_completion_tokens, C = cache_tokens:

        L <= M - C        0
        M - C < L <= M    ((M - C) - L) / C
        M < L             -1

    Example: M = 100, C = 20: L = 80 -> 0, L = 90 -> (80 - 90) / 20 = -0.5, L = 100 -> -1, L = 101 -> -1.
    """
    _check_overlong({"max_completion_tokens": max_completion_tokens, "cache_tokens": cache_tokens})
    free = max_completion_tokens - cache_tokens
    return [min(0.0, max(-1.0, (free - len(ids)) / cache_tokens)) for ids in completion_ids]


@checked_by(_check_cosine)
def cosine_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_completion_tokens: int,
    correctness: Literal["math", "number", "exact"] = "math",
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceed: float = -1.0,
    **columns: Any,
) -> list[float | None]:
    """Cosine-scaled length reward ("Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv 2502.03373):

        R(L) = r_long + (r_short - r_long) (1 + cos(pi L / M)) / 2    for L < M = max_completion_tokens
        R(L) = exceed                                                 for L >= M

    with (r_short, r_long) of a correct or of a wrong completion: correct ones earn more when short, wrong ones lose
    less when long. `correctness` names the built-in that decides: math_answer, number_match or exact_match; where that
    gives None, so does this. The default values are milder than the paper's.

    Example: M = 100, correct, L = 50: cos(pi / 2) = 0, so 0.5 + (1.0 - 0.5) x 1 / 2 = 0.75.
    """
    _check_cosine({"max_completion_tokens": max_completion_tokens, "correctness": correctness})
    scores: list[float | None] = []
    for correct, ids in zip(_correctness(correctness, completions, columns), completion_ids, strict=True):
        if correct is None:
            scores.append(None)
        elif len(ids) >= max_completion_tokens:
            scores.append(exceed)
        else:
            short, long = (correct_short, correct_long) if correct > 0.5 else (wrong_short, wrong_long)
            fraction = (1.0 + math.cos(math.pi * len(ids) / max_completion_tokens)) / 2.0
            scores.append(long + (short - long) * fraction)
    return scores


def _correctness(kind: str, completions: Sequence[Any], columns: dict[str, Any]) -> list[float | None]:
    if kind == "math":
        from grpo_async.rewards.math import math_answer  # here: it needs the extra `math`

        return math_answer(completions, columns.get("answer"), columns.get("solution"))
    if "answer" not in columns:
        raise ValueError("cosine_length needs a column `answer`; rename one with `data.train.columns`")
    return (
        text.number_match(completions, columns["answer"])
        if kind == "number"
        else text.exact_match(completions, columns["answer"])
    )
