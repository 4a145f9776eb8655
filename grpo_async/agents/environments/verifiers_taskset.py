"""Environments of the library verifiers (0.4): tasksets with their rewards, metrics, tools and users, also with several agents.

An agent that names no `model`, `client` or `harness` of its own is the policy, and runs in the chat loop of `ChatHarness` in this
process: the library's own defaults would start a process for each turn, in a cloud sandbox, and give the model a shell.
The library calls a model through its own server, which has one client for all rollouts. `_SessionKeys` makes each agent call with
a key of its rollout's session: one that is not `trainable` uses the key whose calls are not trained.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import verifiers.v1 as vf
from openai import BadRequestError
from pydantic import ValidationError
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import Interception
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from grpo_async.agents.agent import REWARD, AgentError
from grpo_async.agents.calls import BUDGET_EXHAUSTED
from grpo_async.agents.function import AgentClient, OpenAiClients
from grpo_async.errors import ConfigError
from grpo_async.utils.validation import problems_of

__all__ = ["ChatHarness", "VerifiersEnvironment"]  # the library finds a module's harness here

_ID = "grpo_async_chat"
sys.modules.setdefault(_ID, sys.modules[__name__])  # the library imports a harness by its id, which may have no dots
_CLIENTS = OpenAiClients(timeout_s=86_400.0)  # the rollout has its own time limit

TASK = "task"
"""The column with a task's data, as `tasks` makes it."""
_THEIR_DEFAULT = "bash"
_NO_VARIABLE = "GRPO_ASYNC_AGENT_KEY"
"""The variable in which the library would look for a key; never set."""
_client: ContextVar[AgentClient] = ContextVar("client of the rollout's session")


class VerifiersEnvironment:
    """See the module's docstring."""

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


class ChatHarnessConfig(HarnessConfig):
    id: str = _ID


class ChatHarness(Harness[ChatHarnessConfig]):
    """Chats through the rollout's endpoint and runs the tools that the model calls, until an answer calls none or the budget is
    used up."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        client = _CLIENTS.get(endpoint, secret, is_async=True).with_options(base_url=endpoint)
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            schemas, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            tools = {"tools": schemas} if schemas else {}
            while True:
                try:
                    completion = await client.chat.completions.create(model=ctx.model, messages=messages, **tools)
                except BadRequestError as error:
                    if BUDGET_EXHAUSTED not in str(error):
                        raise
                    trace.stop("max_output_tokens")  # the task scores the conversation so far
                    break
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    content = await _result_of(call.function, places, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _result_of(function: Any, places: Any, connections: Any) -> Any:
    """The text that the model sees for its call, including errors in the call."""
    if function.name not in places:
        return f"error: there is no tool {function.name!r}; there are {sorted(places)}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments must be a JSON object, not {arguments!r}"
    return await call_mcp(connections, places, function.name, arguments)
