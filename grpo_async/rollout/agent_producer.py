"""Makes groups of rollouts with the user's agent. Each rollout is a session at the endpoint, a run of the agent, and a completion.

    open a session -> agent.run(row, session) -> close it -> session.completion

However a run of the agent ends, its session is closed at once: its key is refused and its requests are cancelled. A rollout that
used up its tokens is truncated, whatever the agent returned or raised. A resume restarts the rollouts that were not over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from grpo_async.agents.agent import Agent, AgentError, AgentResult
from grpo_async.agents.endpoint import AgentEndpoint
from grpo_async.agents.session import AgentSession
from grpo_async.buffer.group import OpenGroup
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config.sections import AgentSection
from grpo_async.errors import FatalRolloutError, RunError, message_of
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import Prompt, RolloutCompletion, RolloutStatus
from grpo_async.rollout.group import ErrorLog
from grpo_async.tracking.timeline import span
from grpo_async.user_code.calls import own_copy
from grpo_async.utils.seeds import seed_of

_TIMEOUT_MARGIN_S = 5.0  # an agent that enforces the limit itself reports better what it was doing


class AgentHost:
    """The agent of a run and the endpoint that it calls. One in a process, for training and evaluation."""

    def __init__(self, agent: Agent, section: AgentSection, *, max_concurrent: int) -> None:
        self.agent = agent
        self.section = section
        self.max_concurrent = max_concurrent
        self.slots = asyncio.Semaphore(max_concurrent)
        self._endpoint: AgentEndpoint | None = None

    async def endpoint(self, client: InferenceClient, renderer: ChatRenderer) -> AgentEndpoint:
        """Return the endpoint. The first call makes it listen, on the event loop of that call."""
        if self._endpoint is None:
            self._endpoint = AgentEndpoint(client, renderer, host=self.section.host, port=self.section.port)
        try:
            await self._endpoint.start()  # no effect if it already listens
        except RunError as error:  # every group would fail in the same way
            raise FatalRolloutError(str(error)) from error
        return self._endpoint

    async def aclose(self) -> None:
        """Stop listening and release the resources that the agent's runs share."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.aclose()
        await self.agent.aclose()


class AgentProducer:
    """See the module's docstring; implements rollout.group.GroupProducer."""

    def __init__(
        self,
        host: AgentHost,
        client: InferenceClient,
        renderer: ChatRenderer,
        settings: SamplingSettings,
        *,
        needs_reward: bool,
        errors: ErrorLog,
    ) -> None:
        self._host = host
        self._client = client
        self._renderer = renderer
        self._settings = settings
        self._needs_reward = needs_reward
        self._errors = errors

    @asynccontextmanager
    async def produce(self, group: OpenGroup) -> AsyncIterator[None]:
        endpoint = await self._host.endpoint(self._client, self._renderer)
        group.completions = await asyncio.gather(
            *(self._rollout(endpoint, group, index) for index in range(group.size))
        )
        yield

    async def _rollout(self, endpoint: AgentEndpoint, group: OpenGroup, index: int) -> RolloutCompletion:
        """Make one completion. Raises nothing but cancellation."""
        completion: RolloutCompletion | None = None
        restored = group.restored.get(index)
        if isinstance(restored, RolloutCompletion):
            return restored
        group.snapshots[index] = lambda: completion
        rollout_id = group.rollout_id(index)
        async with self._host.slots:  # each run that holds a slot has a time limit
            with span("rollout", rollout=rollout_id, group=group.name) as details:
                session = AgentSession(
                    endpoint.sessions,
                    rollout_id,
                    settings=self._settings,
                    seed=seed_of(group.seed, index),
                    affinity=f"{group.name}/{index}",
                    on_tokens=partial(group.received, index),
                )
                try:
                    completion = await self._run(group.prompt, session)
                finally:
                    session.close()
                details |= {
                    "status": str(completion.status),
                    "calls": len(completion.all_turns),
                    "branches": len(completion.branches),
                    "tokens": completion.num_sampled_tokens,
                }
        return completion

    async def _run(self, prompt: Prompt, session: AgentSession) -> RolloutCompletion:
        section = self._host.section
        # the agent may modify its row
        row: dict[str, Any] = own_copy({"prompt": prompt.as_given(), **prompt.columns})
        limit = asyncio.timeout(self._host.agent.start_timeout_s + section.timeout_s + _TIMEOUT_MARGIN_S)
        try:
            async with limit:
                result = await self._host.agent.run(row, session)
            return self._completion(result, session)
        except Exception as error:  # noqa: BLE001 - only this rollout fails; the group decides about the others
            if session.is_out_of_budget:  # the error most likely says that it got no further answer
                self._errors.count("agent out of tokens")
                return session.completion(RolloutStatus.TRUNCATED, reward_columns={"result": None})
            self._errors.note("rollout", error)
            message = message_of(error)
            if limit.expired():
                message = f"the agent did not finish within rollout.agent.timeout_s = {section.timeout_s:g} s"
            if session.last_error is not None:
                message = f"{message} (its last call to the model failed: {session.last_error})"
            return session.completion(RolloutStatus.FAILED, error=message)

    def _completion(self, result: AgentResult, session: AgentSession) -> RolloutCompletion:
        """Build the completion, with the result's rewards for single answers; AgentError where nothing can be learned from it."""
        for answer_id, reward in result.rewards.items():
            try:
                session.set_reward(answer_id, reward)
            except LookupError as error:
                raise AgentError(f"`rewards` of the agent's result: {error}") from error
        completion = session.completion(
            RolloutStatus.FINISHED, reward=result.reward, reward_columns={**result.columns, "result": result.value}
        )
        if completion.num_sampled_tokens == 0 and not session.is_truncated:
            raise AgentError(
                "the agent ended without an answered call to the model; it has to call the endpoint of its rollout, with its key "
                "(in a function: client.openai; in a command: $OPENAI_BASE_URL and $OPENAI_API_KEY, or those of $ANTHROPIC)"
            )
        if self._needs_reward and not completion.environment_rewards:
            raise AgentError(
                f"the agent's result has no reward, and the run has no other; it is {result.value!r:.200}. Return a number or "
                '{"reward": number}, or name functions in `rewards`'
            )
        return completion
