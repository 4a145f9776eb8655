"""A reward for the length of a completion, in tokens. L is the number of tokens of one completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def _check_overlong(arguments: Mapping[str, Any]) -> None:
    for name in ("max_completion_tokens", "cache_tokens"):
        value = arguments.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {value!r} must be a whole number of at least 1")
    longest, cache = arguments.get("max_completion_tokens"), arguments.get("cache_tokens", 1)
    if longest is not None and cache > longest:
        raise ValueError(f"cache_tokens: {cache} must be in 1..max_completion_tokens ({longest})")


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


soft_overlong.check_arguments = _check_overlong  # type: ignore[attr-defined]
