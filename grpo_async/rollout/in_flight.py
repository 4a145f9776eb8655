"""The groups that were started and are neither closed nor queued: what the worker keeps of each, what a checkpoint sees of it, and
what it is waiting for, as text."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_async.buffer.resume import GroupSnapshot, PartialRollout, RolloutSnapshot
from grpo_async.records import RolloutCompletion, RolloutGroup, ScoredGroup


@dataclass(slots=True)
class OpenGroup:
    """A group that is generating, being scored, or waiting for room in the queue.

    A producer finds in `restored` what a checkpoint had of a rollout, and puts into `snapshots` what gives a copy of what there is
    of it at the moment of the call, on the event loop. Rollouts go by their index.
    """

    group: RolloutGroup
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    scored: ScoredGroup | None = None  # when it only waits for room in the queue
    restored: Mapping[int, RolloutSnapshot] = field(default_factory=dict)
    snapshots: dict[int, Callable[[], RolloutSnapshot | None]] = field(default_factory=dict)
    is_running: bool = False  # its task has begun
    is_too_stale: bool = False
    oldest_versions: dict[int, int] = field(default_factory=dict)  # among the tokens of each rollout
    num_tokens: dict[int, int] = field(default_factory=dict)  # received; a rollout without any is not in it

    def snapshot(self) -> GroupSnapshot:
        """What there is of each rollout that has not failed: a failed one is tried again by a resume."""
        found = dict(self.restored)  # no producer has taken these yet
        found |= {index: each for index, take in self.snapshots.items() if (each := take()) is not None}
        whole = {i: e for i, e in found.items() if not (isinstance(e, RolloutCompletion) and not e.status.is_trainable)}
        return GroupSnapshot(prompt_id=self.group.prompt.prompt_id, rollouts=whole)

    def restore(self, rollouts: Mapping[int, RolloutSnapshot]) -> int:
        """Go on with rollouts of a checkpoint; returns the number of their tokens."""
        self.restored = rollouts
        self.num_tokens = {index: each.num_sampled_tokens for index, each in rollouts.items()}
        versions = {index: each.oldest_version for index, each in rollouts.items()}
        self.oldest_versions = {index: version for index, version in versions.items() if version is not None}
        return sum(self.num_tokens.values())

    @property
    def oldest_version(self) -> int | None:
        """Among the tokens received so far."""
        return min(self.oldest_versions.values(), default=None)

    @property
    def stage(self) -> str:
        if self.scored is not None:
            return "waiting for room in the queue"
        return "being scored" if self.group.completions else "generating"

    def __str__(self) -> str:
        """group 7, for 31 s: being scored, tokens of its rollouts: 0: 12, 1: 8"""
        tokens = ", ".join(f"{index}: {count}" for index, count in sorted(self.num_tokens.copy().items())) or "none"
        age_s = time.monotonic() - self.began
        return f"group {self.group.group_id}, for {age_s:.0f} s: {self.stage}, tokens of its rollouts: {tokens}"


def describe(groups: Sequence[OpenGroup]) -> str:
    """2 groups in flight (1 generating, 1 being scored), the oldest: group 7, for 31 s: ..."""
    if not groups:
        return "no group in flight"
    stages = ", ".join(f"{count} {stage}" for stage, count in Counter(group.stage for group in groups).items())
    return f"{len(groups)} groups in flight ({stages}), the oldest: {min(groups, key=lambda group: group.began)}"


def without_open_turns(rollouts: Mapping[int, RolloutSnapshot]) -> dict[int, RolloutSnapshot]:
    """Whole rollouts and whole turns. Rollouts of which nothing is left are not in it."""
    kept: dict[int, RolloutSnapshot] = {}
    for index, each in rollouts.items():
        if isinstance(each, PartialRollout):
            if not each.turns:
                continue
            each = PartialRollout(rollout_id=each.rollout_id, prompt_ids=each.prompt_ids, turns=each.turns)
        kept[index] = each
    return kept
