"""A harness of verifiers that chats in this process: the library's own harnesses start a new Python process for every turn.

It sends the conversation through the rollout's endpoint and runs the tools of the task's tool servers that the model calls. It
ends when an answer calls no tool, or when the rollout's budget is used up.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

from openai import BadRequestError
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from grpo_async.agents.calls import BUDGET_EXHAUSTED
from grpo_async.agents.function import OpenAiClients

__all__ = ["ChatHarness"]  # the library finds a module's harness here

_ID = "grpo_async_chat"
sys.modules.setdefault(_ID, sys.modules[__name__])  # the library imports a harness by its id, which may have no dots
_CLIENTS = OpenAiClients(timeout_s=86_400.0)  # the rollout has its own time limit


class ChatHarnessConfig(HarnessConfig):
    id: str = _ID


class ChatHarness(Harness[ChatHarnessConfig]):
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
