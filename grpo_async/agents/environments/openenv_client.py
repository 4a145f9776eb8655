"""Environments of the library OpenEnv, whose server is already running.

An environment that offers MCP tools offers them to the model; any other has one form of action, which becomes one
tool. (For actions that are the answer's text, use `verifiers:openenv`.) The reward is the sum of the steps' rewards,
as in TRL and verifiers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from openenv import GenericEnvClient

from grpo_async.agents.agent import REWARD, AgentError
from grpo_async.agents.function import AgentClient
from grpo_async.config.base import Count, Seconds, StrictModel, read_arguments
from grpo_async.errors import ConfigError, message_of

_OWN_FIELDS = ("done", "reward", "metadata")
"""Fields of every observation."""
_MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action schema of an environment that has tools."""


class OpenEnvOptions(StrictModel):
    """`rollout.agent.arguments` of an environment of OpenEnv."""

    tool: str = "act"
    """Name of the tool whose arguments are an action, if the environment has no tools of its own."""
    max_steps: Count = 100
    """Number of steps after which an episode ends, done or not."""
    message_timeout_s: Seconds = 60.0
    """Time limit of one reset or step."""


class OpenEnvEnvironment:
    """See the module's docstring."""

    def __init__(self, url: str, arguments: Mapping[str, Any]) -> None:
        try:
            self._options = read_arguments(OpenEnvOptions, arguments)
        except ValueError as error:
            raise ConfigError(f"rollout.agent.arguments.{error}") from error
        if "://" not in url:
            raise ConfigError(
                f"{url!r} is not a URL; start the environment's server (uvicorn MODULE:APP --port 8100) and write "
                "openenv:http://HOST:8100"
            )
        self._url = url
        self._actions: Mapping[str, Any] | None = None

    def tasks(self) -> Iterator[dict[str, Any]]:
        raise ConfigError(
            "an environment of OpenEnv makes its task at `reset`: use data.train.type: environment, whose rows have a `seed`, or "
            "data of yours, whose columns `reset` gets"
        )

    async def run(self, row: Mapping[str, Any], client: AgentClient) -> Mapping[str, Any]:
        if self._actions is None:
            self._actions = await self._read_actions()
        async with GenericEnvClient(
            base_url=self._url, message_timeout_s=self._options.message_timeout_s
        ) as environment:
            episode = _Episode(environment, client, self._actions, self._options)
            try:
                await episode.play(row)
            except RuntimeError as error:  # the client raises it for errors of the server
                hint = (
                    "; let its application have more sessions (max_concurrent_envs), or lower rollout.agent.max_concurrent"
                    if "CAPACITY" in str(error)
                    else ""
                )
                raise AgentError(f"{self._url}: {error}{hint}") from error
        return {REWARD: episode.reward, "steps": episode.num_steps, "done": episode.is_done}

    async def aclose(self) -> None:
        """Does nothing: episodes share nothing."""

    async def _read_actions(self) -> Mapping[str, Any]:
        """The schema of the environment's actions."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=self._options.message_timeout_s) as http:
                response = (await http.get(f"{self._url.rstrip('/')}/schema")).raise_for_status()
            schema: Mapping[str, Any] = response.json()["action"]
        except httpx.HTTPError as error:
            raise AgentError(f"there is no server of OpenEnv at {self._url}: {message_of(error)}") from error
        return schema


@dataclass(slots=True)
class _Episode:
    """One conversation between the policy and a session of the environment's server."""

    environment: Any
    client: AgentClient
    actions: Mapping[str, Any]
    options: OpenEnvOptions
    reward: float = 0.0
    num_steps: int = 0
    is_done: bool = False

    @property
    def _has_own_tools(self) -> bool:
        return self.actions.get("title") in _MCP_ACTIONS

    @property
    def _is_over(self) -> bool:
        return self.is_done or self.num_steps >= self.options.max_steps

    async def play(self, row: Mapping[str, Any]) -> None:
        start = await self.environment.reset(**{name: value for name, value in row.items() if name != "prompt"})
        self.is_done = bool(start.done)
        messages = _with_text(row["prompt"], _text(start.observation))
        tools = await self._tools()
        while not self._is_over:
            completion = await self.client.openai.chat.completions.create(
                model=self.client.model, messages=messages, tools=tools
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                text = await self._call(call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    async def _tools(self) -> list[dict[str, Any]]:
        if self._has_own_tools:
            listed = (await self.environment.step({"type": "list_tools"})).observation["tools"]
            schemas = [(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]
        else:
            actions = self.actions
            fields = {name: form for name, form in actions.get("properties", {}).items() if name != "metadata"}
            schemas = [(self.options.tool, actions.get("description", ""), {**actions, "properties": fields})]
        return [
            {"type": "function", "function": {"name": name, "description": description, "parameters": form}}
            for name, description, form in schemas
        ]

    async def _call(self, function: Any) -> str:
        """The result of a tool call, or what is wrong with the call; an invalid call costs no step."""
        arguments = json.loads(function.arguments)  # always an object: the endpoint makes no other calls
        if self._is_over:
            return "error: the episode is over"
        if self._has_own_tools:
            return await self._step({"type": "call_tool", "tool_name": function.name, "arguments": arguments})
        if function.name != self.options.tool:
            return f"error: there is no tool {function.name!r}, only {self.options.tool!r}"
        return await self._step(arguments)

    async def _step(self, action: Mapping[str, Any]) -> str:
        """The observation as text. If the server refuses an action, the model sees the reason, and the episode continues."""
        try:
            result = await self.environment.step(action)
        except RuntimeError as error:  # the client raises it for the server's errors
            self.num_steps += 1
            return f"error: {error}"
        self.num_steps += 1
        self.reward += float(result.reward or 0.0)
        self.is_done = bool(result.done)
        return _text(result.observation)


def _text(observation: Mapping[str, Any]) -> str:
    """{"result": "42", "done": false, "reward": 0} -> `42`; several fields as JSON; an MCP tool's data, or its error."""
    fields = {name: value for name, value in observation.items() if name not in _OWN_FIELDS and value is not None}
    if "tool_name" in fields:
        if "error" in fields:
            error = fields["error"]
            return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
        result = fields.get("result")
        data = result.get("data", result) if isinstance(result, Mapping) else result
        return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def _with_text(prompt: Any, text: str) -> list[dict[str, Any]]:
    """The row's prompt as messages, with the first observation appended to the last user message; if there is none, it becomes a
    user message by itself. A blank line precedes it, unlike in `rollout.conversation.with_environment_text`: a user's own
    environment knows its prompts, a server does not."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
    if text:
        last = next((message for message in reversed(messages) if message["role"] == "user"), None)
        if last is None:
            messages.append({"role": "user", "content": text})
        else:
            last["content"] = f"{last['content']}\n\n{text}" if last["content"] else text
    return messages
