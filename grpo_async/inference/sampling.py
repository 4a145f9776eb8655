"""How a rollout samples: its settings and limits, and the seeds of its requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are sampled and where a rollout is cut."""

    temperature: float
    max_completion_tokens: int
    max_model_len: int
    max_turn_tokens: int | None = None
    max_turns: int = 1_000_000
    stop_token_ids: Sequence[int] = ()

    def turn_budget(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """max_tokens of a turn = min(turn limit, what is left of the completion budget, what fits into the model length).

        Turn limit none, budget 48, 40 used, model length 128, 100 in the context: min(8, 28) = 8.
        """
        left = self.max_completion_tokens - num_completion_tokens
        fits = self.max_model_len - num_prompt_tokens - num_completion_tokens
        budget = max(0, min(left, fits))
        return budget if self.max_turn_tokens is None else min(budget, self.max_turn_tokens)


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^31), the same on every machine, that has nothing to do with that of any other parts.

    Counting up instead would give turn 1 of a rollout the seed of turn 0 of its neighbour, and both the same draws.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
