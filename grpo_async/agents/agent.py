"""The interface of an agent, whichever kind it is, and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_async.agents.session import AgentSession
from grpo_async.errors import GrpoAsyncError
from grpo_async.user_code.calls import read_number, shown

REWARD, REWARDS = "reward", "rewards"
"""Keys of an agent's result: the reward of the rollout, and those of single branches by the id of a response in them."""


class AgentError(GrpoAsyncError):
    """One run of an agent failed, and with it only its rollout. The message says what the agent did and where to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """An agent's result of one rollout."""

    value: Any = None  # as it was returned or printed; reward functions get it as `result`
    reward: float | None = None  # None: reward functions give it
    columns: Mapping[str, Any] = field(default_factory=dict)  # further ones for reward functions
    rewards: Mapping[str, float] = field(default_factory=dict)  # of single branches, by the id of a response in them


class Agent(ABC):
    """Makes rollouts by calling the model through a session."""

    start_timeout_s: float = 0.0
    """The longest time that a run may take to start, before its `timeout_s` begins."""

    @abstractmethod
    async def run(self, row: Mapping[str, Any], session: AgentSession) -> AgentResult:
        """Run one rollout. When this ends, however it ends, nothing of the agent may still be running (except a thread, which
        cannot be killed).

        Args:
            row: the columns of the data, `prompt` among them; the agent's own copy.

        Raises:
            AgentError: the agent failed.
        """

    async def aclose(self) -> None:
        """Release the resources that the rollouts share."""
        return


def read_result(raw: Any) -> AgentResult:
    """Convert what an agent returned or printed to a result.

    0.5 -> reward 0.5; {"reward": 1, "tests": 7} -> reward 1.0, column `tests`; None -> nothing.
    {"reward": 1, "rewards": {"chatcmpl-1": 0.2}}: the branch with that response has its own reward.
    """
    if not isinstance(raw, Mapping):
        try:
            return AgentResult(value=raw, reward=read_number(raw))
        except ValueError as error:
            raise AgentError(f"the agent's result is {error}, or an object with `{REWARD}`") from error
    columns = {str(name): value for name, value in raw.items()}
    reward = _number(columns.pop(REWARD, None), REWARD)
    of_branches = columns.pop(REWARDS, None)
    if of_branches is not None and not isinstance(of_branches, Mapping):
        raise AgentError(
            f"`{REWARDS}` of the agent's result is {shown(of_branches)}; it must map ids of responses to numbers"
        )
    numbers = {str(name): _number(value, f"{REWARDS}.{name}") for name, value in (of_branches or {}).items()}
    rewards = {name: number for name, number in numbers.items() if number is not None}
    return AgentResult(value=raw, reward=reward, columns=columns, rewards=rewards)


def _number(value: Any, name: str) -> float | None:
    try:
        return read_number(value)
    except ValueError as error:
        raise AgentError(f"`{name}` of the agent's result is {error}") from error
