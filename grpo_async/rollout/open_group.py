"""A group from its start until it is settled or queued: what the worker keeps of it, and what a checkpoint sees of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from grpo_async.buffer.resume import Begun, GroupInProgress, PartialRollout
from grpo_async.records import RolloutCompletion, RolloutGroup, ScoredGroup


@dataclass(slots=True)
class OpenGroup:
    """A group that is generating or being scored."""

    group: RolloutGroup
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    scored: ScoredGroup | None = None  # when it only waits for room in the queue
    begun: Mapping[int, Begun] = field(default_factory=dict)  # of a checkpoint
    looks: dict[int, Callable[[], Begun | None]] = field(default_factory=dict)
    has_begun: bool = False  # its task runs
    too_stale: bool = False
    oldest_versions: dict[int, int] = field(default_factory=dict)  # among the tokens of each rollout
    received: dict[int, int] = field(default_factory=dict)  # tokens of each rollout

    def restored(self, index: int) -> Begun | None:
        """See GroupProgress."""
        return self.begun.get(index)

    def watch(self, index: int, look: Callable[[], Begun | None]) -> None:
        """See GroupProgress."""
        self.looks[index] = look

    def look(self) -> GroupInProgress:
        """What there is of each rollout that has not failed: a failed one is tried again by a resume."""
        found = dict(self.begun)  # what no producer has looked at yet
        found |= {index: each for index, look in self.looks.items() if (each := look()) is not None}
        whole = {i: e for i, e in found.items() if not (isinstance(e, RolloutCompletion) and not e.status.is_trainable)}
        return GroupInProgress(prompt_id=self.group.prompt.prompt_id, begun=whole)

    def take_up(self, begun: Mapping[int, Begun]) -> int:
        """Go on with rollouts of a checkpoint; returns the number of their tokens."""
        self.begun = begun
        self.received = {index: each.num_sampled_tokens for index, each in begun.items()}
        versions = {index: each.oldest_version for index, each in begun.items()}
        self.oldest_versions = {index: version for index, version in versions.items() if version is not None}
        return sum(self.received.values())


def without_open_turns(begun: Mapping[int, Begun]) -> dict[int, Begun]:
    """What is over of each rollout: whole rollouts and whole turns. Rollouts of which nothing is left are not in it."""
    kept: dict[int, Begun] = {}
    for index, each in begun.items():
        if isinstance(each, PartialRollout):
            if not each.turns:
                continue
            each = replace(each, open_ids=(), open_logprobs=(), open_versions=(), open_finish=None)
        kept[index] = each
    return kept
