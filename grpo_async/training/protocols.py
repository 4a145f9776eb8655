"""What the main loop talks to: the source of samples, the way of the weights, the evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from grpo_async.buffer.resume import ResumeState
from grpo_async.records import GroupStatus, ScoredGroup, TokenFigures
from grpo_async.weights.verify import TrainerScores


class RolloutSource(Protocol):
    """Where samples come from: the rollout thread with its buffer and ledger."""

    def take(
        self,
        num_groups: int,
        *,
        trainer_version: int,
        heartbeat: Callable[[], None],
        attend: Callable[[], None],
    ) -> list[ScoredGroup] | None:
        """Block until there are groups, calling `heartbeat` now and then and `attend` whenever the servers change; None when the
        run is to stop."""

    def stores(self, group_id: int) -> bool:
        """Whether the rollout store keeps this group should it be trained. (What fails or gets stale is kept in any case.)"""

    def settle(
        self,
        groups: Sequence[ScoredGroup],
        status: GroupStatus,
        *,
        step: int,
        figures: Mapping[str, TokenFigures] = ...,
    ) -> None:
        """The trainer is done with these groups. `figures`: of their trained tokens, by rollout id, where there are some."""

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]: ...

    def advance(self, version: int) -> None:
        """The servers serve `version` from now on."""

    def resume_state(self) -> ResumeState:
        """Everything that a resume needs of this side, of one instant; call it between two steps."""

    def gauges(self) -> dict[str, float]:
        """Queue length and ledger."""


class WeightSync(Protocol):
    """The way of the weights to the inference servers."""

    @property
    def has_joiners(self) -> bool:
        """Whether some server could serve if it had the weights."""

    @property
    def has_serving(self) -> bool:
        """Whether some server serves."""

    def push(self, version: int, *, before_gather: Callable[[], None]) -> dict[str, float] | None:
        """Push the current weights as `version` to every server that is up, and return metrics; None when no server is.

        Calls `before_gather` before each pass over the parameters: the other ranks have to take part in it.
        """

    def verify(self, score: Callable[[Sequence[Sequence[int]], str], TrainerScores]) -> dict[str, float]:
        """Where it is due, compare the servers with `score`, which gives the trainer's own log-probabilities of sequences at the
        rounding of a dtype; returns metrics.

        Raises:
            RunError: a server serves other weights than the trainer has.
        """

    def rest(self) -> None:
        """A step begins to train. What the servers hold of a shared GPU may be given back until the next push."""


class Evaluations(Protocol):
    """Evaluations beside training. Neither member ever blocks."""

    @property
    def holds_push(self) -> bool:
        """Whether one is running that wants one policy version only: the servers keep theirs until it is over."""

    def after_step(self, step: int, metrics: dict[str, float], *, is_served: bool) -> None:
        """`step` is done: add the results of an evaluation that has ended to its metrics, and start the one that is due, if the
        weights of this step are served."""


class NoEvaluations:
    """A run without evaluations."""

    holds_push = False

    def after_step(self, step: int, metrics: dict[str, float], *, is_served: bool) -> None:
        """There is nothing to do."""
