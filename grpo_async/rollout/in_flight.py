"""What the groups in flight are waiting for, in words: for errors of waits, and for a run that stands still. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stage = Literal["generating", "being scored", "waiting for room in the queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInFlight:
    """One group. `tokens` are those received of each of its rollouts, by index; a rollout without any is not in it."""

    group_id: int
    age_s: float
    stage: Stage
    tokens: dict[int, int]

    def __str__(self) -> str:
        """group 7, for 31 s: being scored, tokens of its rollouts: 0: 12, 1: 8"""
        tokens = ", ".join(f"{index}: {count}" for index, count in sorted(self.tokens.items())) or "none"
        return f"group {self.group_id}, for {self.age_s:.0f} s: {self.stage}, tokens of its rollouts: {tokens}"


def describe(groups: Sequence[GroupInFlight]) -> str:
    """2 groups in flight (1 generating, 1 being scored), the oldest: group 7, for 31 s: ..."""
    if not groups:
        return "no group in flight"
    stages = ", ".join(f"{count} {stage}" for stage, count in Counter(group.stage for group in groups).items())
    oldest = max(groups, key=lambda group: group.age_s)
    return f"{len(groups)} groups in flight ({stages}), the oldest: {oldest}"
