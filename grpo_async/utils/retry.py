"""The one rule of retries over HTTP: what may go away by itself is asked again, bounded and jittered; a refusal never.

What counts as such stands with the callers (`inference.connect`, `rewards.http`): connection errors, answers >= 500; for rewards
429.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Wait base_s x 2^attempt, at most max_s, times a random factor in [0.5, 1)."""

    max_retries: int = 5
    base_s: float = 0.2
    max_s: float = 5.0
    rng: random.Random = field(default_factory=random.Random)

    def delay_s(self, attempt: int) -> float:
        """Seconds to wait before retry number `attempt` (0-based). attempt 2 with base 0.2: 0.8 x [0.5, 1)."""
        longest = min(self.max_s, self.base_s * 2.0**attempt)
        return longest * (0.5 + 0.5 * self.rng.random())


def server_message(body: bytes) -> str:
    """What a server says about an error, wherever it stands: {"error": {"message": "bad id"}} -> "bad id"."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:_MAX_MESSAGE_CHARS] or "(empty body)"
    error = parsed.get("error", parsed.get("detail", parsed)) if isinstance(parsed, dict) else parsed
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)[:_MAX_MESSAGE_CHARS]
