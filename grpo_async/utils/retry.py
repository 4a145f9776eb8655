"""Retries: how long to wait before each, bounded and jittered. An HTTP request is repeated after a failure that may pass by itself,
never after a refusal.

The callers decide what may pass (`inference.connect`, `rewards.served_model`): connection errors, answers >= 500; for rewards 429.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from grpo_async.utils.text import clipped

_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Wait `backoff_s`, times a random factor in [0.5, 1)."""

    max_retries: int = 5
    base_s: float = 0.2
    max_s: float = 5.0
    rng: random.Random = field(default_factory=random.Random)

    def delay_s(self, attempt: int) -> float:
        """Seconds to wait before retry number `attempt` (0-based). attempt 2 with base 0.2: 0.8 x [0.5, 1)."""
        return backoff_s(attempt, self.base_s, self.max_s) * (0.5 + 0.5 * self.rng.random())


def backoff_s(attempt: int, base_s: float, max_s: float) -> float:
    """`base_s`, doubled with each attempt from number 0 on, at most `max_s`: attempt 2 with base 0.2 -> 0.8."""
    return min(max_s, base_s * 2.0 ** min(attempt, 100))  # 2.0**1024 is an OverflowError


def server_message(body: bytes) -> str:
    """What a server says about an error, wherever it stands: {"error": {"message": "bad id"}} -> "bad id"."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return clipped(text, _MAX_MESSAGE_CHARS) or "(empty body)"
    error = parsed.get("error", parsed.get("detail", parsed)) if isinstance(parsed, dict) else parsed
    if isinstance(error, dict):
        error = error.get("message", error)
    return clipped(str(error), _MAX_MESSAGE_CHARS)
