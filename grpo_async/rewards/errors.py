"""The errors of this package."""

from __future__ import annotations

from grpo_async.errors import GrpoAsyncError


class RewardError(GrpoAsyncError):
    """A reward function failed one call; only the group of that call is lost.

    Args:
        name: name of the reward function.
        problem: what happened, with which value, and what to do.
    """

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(name, problem)  # both, so that the error survives pickling on its way out of a worker process

    def __str__(self) -> str:
        return f"reward `{self.name}`: {self.problem}"


class RewardTimeoutError(RewardError):
    """A call took longer than the function's `timeout_s`."""


class RemoteRewardError(GrpoAsyncError):
    """A reward model behind HTTP could not be reached, refused a request, or answered with something unusable."""
