"""Agents that are an environment of the library verifiers, `rollout.agent.environment`: it runs in this process, on a
separate event loop, and calls the model at the endpoint like any agent. `tasks` makes rows of an environment's own
tasks, for `data.train.type: generator`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from grpo_async.agents.function import FunctionAgent
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError, GrpoAsyncError, message_of
from grpo_async.user_code.references import make_working_directory_importable
from grpo_async.utils.extras import needs

if TYPE_CHECKING:
    from grpo_async.agents.environments.verifiers_taskset import VerifiersEnvironment

SETTING = "rollout.agent.environment"
_CLOSE_TIMEOUT_S = 30.0


class EnvironmentAgent(FunctionAgent):
    """Runs an environment like an agent's function: with the same loop, time limit, errors and results."""

    def __init__(self, environment: VerifiersEnvironment, section: AgentSection, *, max_concurrent: int) -> None:
        super().__init__(environment.run, section.model_copy(update={"arguments": {}}), max_concurrent=max_concurrent)
        self._environment = environment

    async def aclose(self) -> None:
        ended = asyncio.wrap_future(self._loop.post(self._environment.aclose))
        await asyncio.wait({ended}, timeout=_CLOSE_TIMEOUT_S)
        await super().aclose()
        if ended.done() and not ended.cancelled() and (error := ended.exception()) is not None:
            raise GrpoAsyncError(f"{SETTING}: the environment could not be closed: {message_of(error)}") from error


def load_environment_agent(section: AgentSection, *, max_concurrent: int) -> EnvironmentAgent:
    """Build the environment that the section names, without starting anything.

    Raises:
        ConfigError: its library is not installed, the environment does not exist, or does not accept its arguments.
    """
    assert section.environment is not None
    try:
        environment = make_environment(section.environment, section.arguments)
    except ConfigError as error:
        raise ConfigError(f"{SETTING}: {section.environment}: {error}") from error
    return EnvironmentAgent(environment, section, max_concurrent=max_concurrent)


def tasks(environment: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Rows for `data.train.type: generator`; `arguments` are those of `rollout.agent.arguments`.

    Raises:
        ConfigError: as in `load_environment_agent`, or the environment has no tasks of its own.
    """
    return make_environment(environment, arguments).tasks()


def make_environment(reference: str, arguments: Mapping[str, Any]) -> VerifiersEnvironment:
    """Build the environment of `verifiers:NAME`."""
    library, _, name = reference.partition(":")
    if library != "verifiers" or not name:
        raise ConfigError(f"{reference!r} is not `verifiers:NAME`")
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"it {needs(library)}")
    make_working_directory_importable()
    from grpo_async.agents.environments.verifiers_taskset import VerifiersEnvironment  # takes seconds to import

    return VerifiersEnvironment(name, arguments)
