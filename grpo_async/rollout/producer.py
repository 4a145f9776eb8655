"""The seam between the worker and whoever makes rollouts: our conversations, or a rollout function of the user.

    worker -> GroupRequest -> GroupProducer.produce -> Produced(completions, environments) -> scoring -> released

A producer never raises for one rollout: a rollout that fails is a completion with status FAILED and its `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_async.buffer.resume import Begun
from grpo_async.records import Prompt, RolloutCompletion

OnGroupTokens = Callable[[int, int, int], None]
"""Called with (index of the rollout, number of new tokens, policy version that sampled them) as they arrive."""


class GroupProgress(Protocol):
    """What a producer shows of a group while it makes it, and what it finds there to go on from."""

    def restored(self, index: int) -> Begun | None:
        """What a checkpoint had of this rollout."""

    def watch(self, index: int, look: Callable[[], Begun | None]) -> None:
        """`look` gives what there is of this rollout at the moment of the call, a copy; on the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A group to make: `size` rollouts of one prompt.

    `name` begins the names of its rollouts ("g7" -> "g7-r0", "g7-r1", ...). `seed` is that of the group, from which rollouts
    and turns have theirs (`seed_of`). `served_version` tells the policy version that the server serves at the moment of the call.
    `progress` is None where nobody asks; a producer that cannot go on in the middle (environments, the user's own function) leaves
    it alone, and its groups are begun anew by a resume.
    """

    name: str
    prompt: Prompt
    size: int
    seed: int
    served_version: Callable[[], int]
    on_tokens: OnGroupTokens | None = None
    progress: GroupProgress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """The rollouts of a group, [size], and the environment instance of each where the run has environments."""

    completions: Sequence[RolloutCompletion]
    environments: Sequence[Any] | None = None


class GroupProducer(Protocol):
    """Makes the rollouts of a group."""

    def produce(self, request: GroupRequest) -> AbstractAsyncContextManager[Produced]:
        """The context lasts as long as the rollouts' environments are needed: leave it after scoring."""
        ...
