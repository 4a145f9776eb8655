"""Agents that are a function of the user: `run(row, client, **arguments) -> float | dict | None`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

from grpo_async.agents.agent import Agent, AgentError, AgentResult, read_result
from grpo_async.agents.session import AgentSession
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError
from grpo_async.user_code.calls import Caller, CallError, UserCall, is_async
from grpo_async.user_code.references import resolve_and_check
from grpo_async.user_code.threads import ThreadRunner, UserLoop
from grpo_async.utils.extras import needs

SETTING = "rollout.agent.function"


class FunctionAgent(Agent):
    """See the module's docstring."""

    def __init__(self, function: Callable[..., Any], section: AgentSection, *, max_concurrent: int) -> None:
        self._function = function
        self._section = section
        self._loop = UserLoop("async agents")  # one loop for all, as an HTTP client that they share belongs to one
        threads = ThreadRunner("agent", max_threads=max_concurrent)
        self._caller = Caller(threads, section.timeout_s, loop=self._loop)
        self._clients = OpenAiClients(timeout_s=section.timeout_s)

    async def run(self, row: Mapping[str, Any], session: AgentSession) -> AgentResult:
        client = AgentClient(session, self._clients, is_async=is_async(self._function))
        call = UserCall(partial(self._function, row, client), self._section.arguments, finish=read_result)
        try:
            return await self._caller.run(call)
        except CallError as error:
            if isinstance(error.error, AgentError):
                raise error.error from error.error.__cause__
            hint = "; raise `rollout.agent.timeout_s` if this is expected" if error.is_timeout else ""
            raise AgentError(f"the agent {error.problem}{hint}") from error.origin

    async def aclose(self) -> None:
        await asyncio.to_thread(self._loop.close)


class AgentClient:
    """The `client` argument of a function: the address of the model, for any library, and a ready client.

    Attributes:
        base_url: URL of OpenAI's APIs; ends in /v1.
        anthropic_base_url: URL of Anthropic's API.
        api_key: key of this rollout; refused when the rollout is over.
        untrained_api_key: a second key: the policy answers, but the answers are not trained, as for a judge or a simulated user.
        model: a model name; the endpoint accepts any.
    """

    def __init__(self, session: AgentSession, clients: OpenAiClients, *, is_async: bool) -> None:
        self.base_url: str = session.base_url
        self.anthropic_base_url: str = session.anthropic_base_url
        self.api_key: str = session.key
        self.untrained_api_key: str = session.untrained_key
        self.model: str = session.model
        self._clients = clients
        self._is_async = is_async

    @cached_property
    def openai(self) -> Any:
        """`openai.AsyncOpenAI` in an async function, otherwise `openai.OpenAI`, with this rollout's key. It does not retry, because
        each retry would be a separate call.
        """
        return self._clients.get(self.base_url, self.api_key, is_async=self._is_async)


class OpenAiClients:
    """Ready clients of the package openai. Clients of one event loop share their connections, as do clients of threads."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # by event loop; clients of threads by this object
        self._shared: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def get(self, base_url: str, api_key: str, *, is_async: bool) -> Any:
        owner = asyncio.get_running_loop() if is_async else self
        with self._lock:
            if owner not in self._shared:
                self._shared[owner] = self._make(base_url, is_async=is_async)
            return self._shared[owner].with_options(api_key=api_key)

    def _make(self, base_url: str, *, is_async: bool) -> Any:
        try:
            import openai  # here, because the import takes a second and only some functions need it
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"`client.openai` {needs('openai')}; or use client.base_url and client.api_key with a client of your own"
            ) from error
        for name in ("httpx", "httpx2"):  # otherwise they log a line for each call
            logging.getLogger(name).setLevel(logging.WARNING)
        # the endpoint is on this machine or near it, so ignore proxies in the environment
        transport: dict[str, Any] = {"trust_env": False, "timeout": self._timeout_s}
        options: dict[str, Any] = {"base_url": base_url, "api_key": "-", "max_retries": 0, "timeout": self._timeout_s}
        if is_async:
            return openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(**transport), **options)
        return openai.OpenAI(http_client=openai.DefaultHttpxClient(**transport), **options)


def load_function_agent(section: AgentSection, *, max_concurrent: int) -> FunctionAgent:
    """Import and check the function.

    Raises:
        ConfigError: it cannot be found or imported, or does not accept its arguments.
    """
    assert section.function is not None
    given: dict[str, Any] = {"row": {}, "client": None}
    function = resolve_and_check(section.function, SETTING, given=given, arguments=section.arguments, may_be_async=True)
    return FunctionAgent(function, section, max_concurrent=max_concurrent)
