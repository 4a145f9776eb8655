"""Environments of the library verifiers (0.4): tasksets with their rewards, metrics, tools and users, also with several agents.

    row's task -> Env.run_episode -> Episode(traces) -> reward, and each reward and metric of the task as a column

An agent that names no `model`, `client` or `harness` of its own is the policy, and runs in the chat loop of `verifiers_chat` in
this process: the library's own defaults would start a process for each turn, in a cloud sandbox, and give the model
a shell. `rollout.agent.arguments` are the library's own environment settings (`EnvConfig`): `taskset`, the agents
(`agent` if there is only one), `id`, `retries`.

The library calls a model through its own intermediate server, which has one client for all rollouts. `_SessionKeys` makes each
agent call with a key of its rollout's session: an agent that is not `trainable` (a judge, a simulated user) uses the key whose
calls are not trained.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.interception import Interception
from verifiers.v1.runtimes import SubprocessConfig, runtime_is_local
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
from verifiers.v1.utils.prime import ensure_prime_auth

from grpo_async.agents.agent import REWARD, AgentError
from grpo_async.agents.environments.verifiers_chat import ChatHarnessConfig
from grpo_async.agents.function import AgentClient
from grpo_async.errors import ConfigError
from grpo_async.utils.validation import problems_of

TASK = "task"
"""The column with a task's data, as `tasks` makes it."""
_THEIR_DEFAULT = "bash"
_NO_VARIABLE = "GRPO_ASYNC_AGENT_KEY"
"""The variable in which the library would look for a key; never set."""
_client: ContextVar[AgentClient] = ContextVar("client of the rollout's session")


class VerifiersEnvironment:
    """See the module's docstring; implements agents.environments.EnvironmentAdapter.

    Args:
        name: id of a taskset: a module that exports one, or one that the library ships.
        arguments: fields of its `EnvConfig`, without the taskset's id.

    Raises:
        ConfigError: the taskset does not exist, or does not accept the arguments.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        taskset = arguments.get("taskset", {})
        if not isinstance(taskset, Mapping):
            raise ConfigError(
                f"rollout.agent.arguments.taskset: is {taskset!r}; it must be the settings of the taskset"
            )
        try:
            config = resolve_env_config({**arguments, "taskset": {**taskset, "id": name}})
            self._env = load_environment(_with_our_defaults(config, name))
        except ValidationError as error:
            raise ConfigError(
                f"rollout.agent.arguments: {problems_of(error)}; they are the settings of the taskset {name!r} (`taskset`) and of "
                "its environment, as verifiers documents them"
            ) from error
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise ConfigError(f"verifiers cannot load the taskset {name!r}: {error}") from error
        self._serving = AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()  # belongs to that loop
        self._is_serving = False

    def tasks(self) -> Iterator[dict[str, Any]]:
        for task in self._env.taskset:
            data = task.data
            system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
            text = data.prompt_text or data.description or data.name or ""
            yield {
                "prompt": [*system, {"role": "user", "content": text}],
                TASK: data.model_dump(mode="json", exclude_defaults=True),
            }

    async def run(self, row: Mapping[str, Any], client: AgentClient) -> Mapping[str, Any]:
        task = self._task(row)
        await self._start()
        _client.set(client)
        served = EvalClientConfig(base_url=client.base_url, api_key_var=_NO_VARIABLE)
        episode = await self._env.run_episode(task, ModelContext(model=client.model, client=served))
        for source in (episode, *episode.traces):
            if not source.ok and source.last_error is not None:
                raise AgentError(f"the environment failed: {source.last_error.type}: {source.last_error.message}")
        return _result([trace for trace in episode.traces if trace.agent is None or trace.agent.trainable])

    async def aclose(self) -> None:
        self._is_serving = False
        await self._serving.aclose()

    def _task(self, row: Mapping[str, Any]) -> vf.Task[Any, Any, Any]:
        taskset = self._env.taskset
        kind = type(taskset).task_type()
        if TASK not in row:
            raise AgentError(
                f"the row has no column `{TASK}`, but {sorted(row)}; have the data made by the taskset: data.train: {{type: "
                "generator, function: 'grpo_async.agents.environments:tasks', arguments: {environment: ...}}"
            )
        return kind(kind.data_type().model_validate(row[TASK]), taskset.config.task)

    async def _start(self) -> None:
        """Start what all episodes share; start it again if its event loop was abandoned."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._starting, self._is_serving = loop, asyncio.Lock(), False
        async with self._starting:
            if self._is_serving:
                return
            self._serving = AsyncExitStack()
            await self._serving.enter_async_context(self._env.serving())
            assert self._env._interception is not None
            self._env._interception = _SessionKeys(self._env._interception)
            self._is_serving = True


class _SessionKeys(Interception):
    """Gives the calls of each agent a key of its rollout's session; all share the connections of one client."""

    def __init__(self, inner: Interception) -> None:
        super().__init__()
        self._inner = inner

    async def start(self) -> None:
        """Does nothing: whoever made `inner` starts and stops it."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        async with self._inner.acquire(session) as slot:
            if getattr(session.ctx.client, "api_key_var", None) == _NO_VARIABLE:  # else it has a model of its own
                agent, client = session.trace.agent, _client.get()
                is_trained = agent is None or agent.trainable
                session.client = copy.copy(session.client)
                session.client.api_key = client.api_key if is_trained else client.untrained_api_key
            yield slot


def _with_our_defaults(config: vf.EnvConfig, name: str) -> vf.EnvConfig:
    """The config with our chat loop for every agent that would get the library's default harness, and with its runtime on this
    machine if the agent names none: the library's default is a cloud sandbox.
    """
    chats = default_agent_harness(name).id == _THEIR_DEFAULT
    agents = {}
    for agent, spec in agent_config_fields(config).items():
        changed: dict[str, Any] = {"harness": ChatHarnessConfig()} if chats and spec.harness is None else {}
        if "runtime" not in spec.model_fields_set:
            changed["runtime"] = SubprocessConfig()
        agents[agent] = spec.model_copy(update=changed)
        if not runtime_is_local(agents[agent].runtime):
            try:
                ensure_prime_auth()
            except SystemExit as error:
                raise ConfigError(f"rollout.agent.arguments.{agent}.runtime: {error}") from error
    return config.model_copy(update=agents)


def _result(traces: list[Any]) -> dict[str, Any]:
    """The mean reward of the policy's traces; each reward and metric also as a column, named AGENT_NAME with several agents.

    {"correct": 1.0 x 2, "short": 0.5} and the metric num_turns 3 -> {"reward": 2.5, "correct": 1.0, "short": 0.5, "num_turns": 3.0}
    """
    if not traces:
        raise AgentError("no agent of the environment is the policy")
    columns: dict[str, Any] = {}
    for trace in traces:
        prefix = f"{trace.agent.name}_" if len(traces) > 1 and trace.agent is not None else ""
        scores = {name: reward and reward.score for name, reward in trace.rewards.items()}
        columns |= {f"{prefix}{name}": value for name, value in {**scores, **trace.metrics}.items()}
    columns.pop(REWARD, None)  # a reward of that name is already in the sum
    return {**columns, REWARD: sum(trace.reward for trace in traces) / len(traces)}
