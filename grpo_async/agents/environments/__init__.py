"""Agents that are an environment of a library: `rollout.agent.environment`, as `make_environment` reads it.

    row -> environment (the library's own code: its tools, its users, its rubric) <-> client of the rollout's session
        -> reward `agent`, its metrics as columns

The environment runs in this process, on an event loop apart from the run's, and calls the model at the endpoint as any agent does:
tokens are exact, and whatever the library makes of the conversation becomes branches. Tool servers that a library starts are
processes that end with this one.

`tasks` makes rows of what an environment knows itself:

    data:
      train:
        type: generator
        function: grpo_async.agents.environments:tasks
        arguments: {environment: verifiers:my_taskset}
        limit: 1000
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from grpo_async.agents.function import AgentClient, FunctionAgent
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.user_code.references import make_working_directory_importable
from grpo_async.utils.extras import needs

SETTING = "rollout.agent.environment"
_CLOSE_TIMEOUT_S = 30.0


class EnvironmentAdapter(Protocol):
    """What an adapter is. All methods are called on one event loop."""

    async def run(self, row: Mapping[str, Any], client: AgentClient) -> Mapping[str, Any]:
        """One episode: `{"reward": ..., column: value, ...}`. Any exception fails the rollout, and its text is the reason."""
        ...

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Rows of the data that the environment brings.

        Raises:
            ConfigError: it brings none.
        """
        ...

    async def aclose(self) -> None:
        """End what the episodes shared."""
        ...


class EnvironmentAgent(FunctionAgent):
    """Runs an environment as the function of an agent: same loop, time limit, errors, reading of results."""

    def __init__(self, environment: EnvironmentAdapter, section: AgentSection, *, max_concurrent: int) -> None:
        super().__init__(environment.run, section.model_copy(update={"arguments": {}}), max_concurrent=max_concurrent)
        self._environment = environment

    async def aclose(self) -> None:
        ended = asyncio.wrap_future(self._loop.post(self._environment.aclose))
        await asyncio.wait({ended}, timeout=_CLOSE_TIMEOUT_S)
        await super().aclose()
        if ended.done() and not ended.cancelled() and (error := ended.exception()) is not None:
            raise GrpoAsyncError(
                f"{SETTING}: closing the environment raised {type(error).__name__}: {error}"
            ) from error


def load_environment_agent(section: AgentSection, *, max_concurrent: int) -> EnvironmentAgent:
    """Make the environment that the section names; nothing of it is started yet.

    Raises:
        ConfigError: its library is not installed, there is no such environment, or it does not take its arguments.
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
        ConfigError: as `load_environment_agent`, or the environment has no tasks of its own.
    """
    return make_environment(environment, arguments).tasks()


def make_environment(reference: str, arguments: Mapping[str, Any]) -> EnvironmentAdapter:
    """`verifiers:NAME` or `openenv:URL`.

    Raises:
        ConfigError: see `load_environment_agent`.
    """
    library, _, name = reference.partition(":")
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"it {needs(library)}")
    make_working_directory_importable()
    # here: the libraries take seconds to import
    if library == "openenv":
        from grpo_async.agents.environments.openenv_client import OpenEnvEnvironment

        return OpenEnvEnvironment(name, arguments)
    from grpo_async.agents.environments.verifiers_taskset import VerifiersEnvironment

    return VerifiersEnvironment(name, arguments)
