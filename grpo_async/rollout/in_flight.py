"""The groups that were started and are neither settled nor queued: what the worker keeps of each, what a checkpoint sees of it, and
what it is waiting for, in words."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from grpo_async.buffer.resume import GroupSnapshot, PartialRollout, RolloutSnapshot
from grpo_async.records import RolloutCompletion, RolloutGroup, ScoredGroup

Stage = Literal["generating", "being scored", "waiting for room in the queue"]


@dataclass(slots=True)
class OpenGroup:
    """A group that is generating or being scored.

    A producer finds in `restored` what a checkpoint had of a rollout, and puts into `snapshots` what gives a copy of what there is
    of it at the moment of the call, on the event loop.
    """

    group: RolloutGroup
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    scored: ScoredGroup | None = None  # when it only waits for room in the queue
    restored: Mapping[int, RolloutSnapshot] = field(default_factory=dict)  # by index: what a checkpoint had
    snapshots: dict[int, Callable[[], RolloutSnapshot | None]] = field(default_factory=dict)
    is_running: bool = False  # its task has begun
    too_stale: bool = False
    oldest_versions: dict[int, int] = field(default_factory=dict)  # among the tokens of each rollout
    received: dict[int, int] = field(default_factory=dict)  # tokens of each rollout

    def snapshot(self) -> GroupSnapshot:
        """What there is of each rollout that has not failed: a failed one is tried again by a resume."""
        found = dict(self.restored)  # what no producer has looked at yet
        found |= {index: each for index, take in self.snapshots.items() if (each := take()) is not None}
        whole = {i: e for i, e in found.items() if not (isinstance(e, RolloutCompletion) and not e.status.is_trainable)}
        return GroupSnapshot(prompt_id=self.group.prompt.prompt_id, rollouts=whole)

    def restore(self, rollouts: Mapping[int, RolloutSnapshot]) -> int:
        """Go on with rollouts of a checkpoint; returns the number of their tokens."""
        self.restored = rollouts
        self.received = {index: each.num_sampled_tokens for index, each in rollouts.items()}
        versions = {index: each.oldest_version for index, each in rollouts.items()}
        self.oldest_versions = {index: version for index, version in versions.items() if version is not None}
        return sum(self.received.values())


def without_open_turns(rollouts: Mapping[int, RolloutSnapshot]) -> dict[int, RolloutSnapshot]:
    """What is over of each rollout: whole rollouts and whole turns. Rollouts of which nothing is left are not in it."""
    kept: dict[int, RolloutSnapshot] = {}
    for index, each in rollouts.items():
        if isinstance(each, PartialRollout):
            if not each.turns:
                continue
            each = replace(each, open_ids=(), open_logprobs=(), open_versions=(), open_finish=None)
        kept[index] = each
    return kept


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
