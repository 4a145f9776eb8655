"""An open group: its rollouts while they are made, and its row in the table of groups."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from grpo_async.buffer.resume import GroupSnapshot, PartialRollout, RolloutSnapshot
from grpo_async.records import Prompt, RolloutCompletion, RolloutGroup, ScoredGroup
from grpo_async.utils.text import count


class GroupState(Enum):
    STARTED = auto()  # its rollouts are generated, then scored
    SCORED = auto()  # it waits for its step
    RESERVED = auto()  # so it does, and is packed already for the next one
    TAKEN = auto()  # a step has it


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGroup:
    """`size` rollouts of one prompt, from their start until they are closed. A rollout is identified by its index.

    Attributes:
        name: prefix of its rollouts' ids.
        served_version: returns the policy version that the servers serve at the moment of the call.
        on_tokens: called with the number of tokens that arrived, and the oldest policy version among them.
        restored: what a checkpoint held of each rollout. A producer that cannot continue a partial rollout ignores it.
        snapshots: functions that each copy the current state of a rollout; called on the event loop.
        num_tokens: received of each rollout; rollouts without any are absent.

    The fields from `state` on belong to the GroupTable and are written under its lock:
        spare_steps: it is due so many steps before the last one that may use it; below 0: at none.
        tokens: sampled tokens, without those of failed rollouts.
        oldest_version: the oldest policy version among them; None where it is not known."""

    prompt: Prompt
    size: int
    name: str = ""
    seed: int = 0
    served_version: Callable[[], int] = int
    on_tokens: Callable[[int, int | None], None] = lambda num_tokens, version: None
    completions: Sequence[RolloutCompletion] = ()
    environments: Sequence[Any] | None = None
    restored: Mapping[int, RolloutSnapshot] = field(default_factory=dict)
    snapshots: dict[int, Callable[[], RolloutSnapshot | None]] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    began: float = field(default_factory=lambda: time.monotonic())
    task: asyncio.Task[None] | None = None
    is_running: bool = False
    is_too_stale: bool = False
    state: GroupState = GroupState.STARTED
    spare_steps: int = 0
    tokens: int = 0
    oldest_version: int | None = None
    scored: ScoredGroup | None = None
    scored_at: float = 0.0

    @property
    def group_id(self) -> int:
        return self.prompt.prompt_id

    @property
    def record(self) -> RolloutGroup:
        return RolloutGroup(prompt=self.prompt, completions=list(self.completions))

    def rollout_id(self, index: int) -> str:
        """ "g7" -> "g7-r0"; `RolloutGroup.name` reads it back."""
        return f"{self.name}-r{index}"

    def received(self, index: int, num_tokens: int, version: int) -> None:
        """Record that tokens of a rollout arrived, sampled by this policy version."""
        self.num_tokens[index] = self.num_tokens.get(index, 0) + num_tokens
        self.on_tokens(num_tokens, version)

    def restore(self, rollouts: Mapping[int, RolloutSnapshot], *, keeps_open_turns: bool) -> None:
        """Continue rollouts of a checkpoint. Without open turns, only complete turns are kept."""
        kept = rollouts
        if not keeps_open_turns:
            kept = {index: whole for index, each in rollouts.items() if (whole := _whole(each)) is not None}
        self.restored = kept
        self.num_tokens = {index: each.num_sampled_tokens for index, each in kept.items()}
        oldest_version = GroupSnapshot(group_id=self.group_id, rollouts=kept).oldest_version
        self.on_tokens(sum(self.num_tokens.values()), oldest_version)

    def snapshot(self) -> GroupSnapshot:
        """The state of each rollout that has not failed; a resume tries failed ones again."""
        found = dict(self.restored)  # no producer has taken these yet
        found |= {index: each for index, take in self.snapshots.items() if (each := take()) is not None}
        kept = {i: e for i, e in found.items() if not (isinstance(e, RolloutCompletion) and not e.status.is_trainable)}
        return GroupSnapshot(group_id=self.group_id, rollouts=kept)

    @property
    def stage(self) -> str:
        return "being scored" if self.completions else "generating"

    def __str__(self) -> str:
        """group 7, for 31 s: being scored, tokens of its rollouts: 0: 12, 1: 8"""
        tokens = ", ".join(f"{index}: {number}" for index, number in sorted(self.num_tokens.copy().items())) or "none"
        age_s = time.monotonic() - self.began
        return f"group {self.group_id}, for {age_s:.0f} s: {self.stage}, tokens of its rollouts: {tokens}"


def describe(groups: Sequence[OpenGroup]) -> str:
    """2 groups in flight (1 generating, 1 being scored), the oldest: group 7, for 31 s: ..."""
    if not groups:
        return "no group in flight"
    stages = ", ".join(f"{number} {stage}" for stage, number in Counter(group.stage for group in groups).items())
    return (
        f"{count(len(groups), 'group')} in flight ({stages}), the oldest: {min(groups, key=lambda group: group.began)}"
    )


def _whole(rollout: RolloutSnapshot) -> RolloutSnapshot | None:
    """A rollout without its open turn; None where nothing is left."""
    if not isinstance(rollout, PartialRollout):
        return rollout
    if not rollout.turns:
        return None
    return PartialRollout(rollout_id=rollout.rollout_id, prompt_ids=rollout.prompt_ids, turns=rollout.turns)
