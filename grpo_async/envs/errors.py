"""The one error of this package beside ConfigError."""

from __future__ import annotations

from grpo_async.errors import GrpoAsyncError


class EnvironmentCallError(GrpoAsyncError):
    """A call of an environment's instance failed; only the rollouts that use the instance are lost.

    Args:
        name: the environment's name in the config.
        problem: what happened, with which value, and what to do.
    """

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"environment `{name}`: {problem}")
