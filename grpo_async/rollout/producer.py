"""The interface between the worker and what makes rollouts: our conversations, or a rollout function of the user.

    worker -> GroupRequest -> GroupProducer.produce -> Produced(completions, environments) -> scoring -> released

A producer never raises for one rollout: a rollout that fails is a completion with status FAILED and its `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_async.records import Prompt, RolloutCompletion
from grpo_async.rollout.in_flight import OpenGroup

OnGroupTokens = Callable[[int, int, int], None]
"""Called with (index of the rollout, number of new tokens, policy version that sampled them) as they arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A group to make: `size` rollouts of one prompt.

    `name` begins the names of its rollouts ("g7" -> "g7-r0", "g7-r1", ...). `seed` is that of the group, from which rollouts
    and turns have theirs (`utils.seeds.seed_of`). `served_version` returns the policy version that the server serves at the
    moment of the call. `progress` shows what there is of each rollout, and holds what a checkpoint had of it; None where nobody
    asks. A producer that cannot continue in the middle (environments, agents, the user's function) leaves it alone, and a resume
    restarts its groups.
    """

    name: str
    prompt: Prompt
    size: int
    seed: int
    served_version: Callable[[], int]
    on_tokens: OnGroupTokens | None = None
    progress: OpenGroup | None = None


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
