"""What an agent is to a rollout, whichever kind it is: something that runs for one row of the data with one session, and says what
came of it.

    function.py       a function of the user, in this process
    command.py        a process for each rollout
    environments/     an environment of a library
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_async.agents.session import AgentSession
from grpo_async.errors import GrpoAsyncError
from grpo_async.user_code.calls import read_number, shown

REWARD, REWARDS = "reward", "rewards"
"""Keys of an agent's result: the reward of the rollout, and those of single calls by the ids of their responses."""


class AgentError(GrpoAsyncError):
    """One run of an agent failed; its rollout fails alone. The message says what the agent did and what to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What an agent says of one rollout.

    Attributes:
        value: what it returned or printed, as it is; reward functions get it as `result`.
        reward: its reward; None where it leaves that to reward functions.
        columns: what else reward functions get.
        rewards: of branches that have a reward of their own, by the id of a response in them.
    """

    value: Any = None
    reward: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)


class Agent(ABC):
    """Makes rollouts by calling the model through a session."""

    start_timeout_s: float = 0.0
    """The longest that a run may take to start, before its `timeout_s` begins."""

    @abstractmethod
    async def run(self, row: Mapping[str, Any], session: AgentSession) -> AgentResult:
        """One rollout. When this ends, however it ends, nothing of the agent runs anymore (a thread excepted, which cannot be
        killed).

        Args:
            row: the columns of the data, `prompt` among them; the agent's own copy.

        Raises:
            AgentError: it failed.
        """

    def notes(self) -> list[str]:
        """What the user should know at startup."""
        return []

    async def aclose(self) -> None:
        """Let go of what the rollouts share."""
        return


def read_result(raw: Any) -> AgentResult:
    """The result that an agent returned or printed.

    0.5 -> reward 0.5; {"reward": 1, "tests": 7} -> reward 1.0, column `tests`; None -> nothing.
    {"reward": 1, "rewards": {"chatcmpl-1": 0.2}}: the branch with that response has a reward of its own.

    Raises:
        AgentError: it is something else, or a reward is not a finite number.
    """
    if not isinstance(raw, Mapping):
        try:
            return AgentResult(value=raw, reward=read_number(raw))
        except ValueError as error:
            raise AgentError(
                f"the agent's result is {shown(raw)}; it must be a number (its reward), an object with `{REWARD}`, or nothing"
            ) from error
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
