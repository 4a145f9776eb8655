"""A reward for the length of a completion, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_async.config.base import Count
from grpo_async.rewards.call import with_checked_arguments


@with_checked_arguments
def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_completion_tokens: Count, cache_tokens: Count, **_: Any
) -> list[float | None]:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), with L tokens, M = max_completion_tokens, C = cache_tokens:

        L <= M - C        0
        M - C < L <= M    ((M - C) - L) / C
        M < L             -1

    Example: M = 100, C = 20: L = 80 -> 0, L = 90 -> (80 - 90) / 20 = -0.5, L = 100 -> -1, L = 101 -> -1.
    """
    free = max_completion_tokens - cache_tokens
    return [min(0.0, max(-1.0, (free - len(ids)) / cache_tokens)) for ids in completion_ids]
