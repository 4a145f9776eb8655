"""Makes groups of conversations: leases environments, renders prompts, runs the rollouts of a group at the same time.

Invariant: whatever a rollout does (fails, hangs, is cancelled), its slot is free again and its environment instance goes back
to the pool or is discarded; a rollout that fails does not touch the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.envs import Environment, Environments
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import IntArray, Origin, Prompt, RolloutCompletion, RolloutStatus, TaggedMessage
from grpo_async.rollout.conversation import Conversation, Rollout
from grpo_async.rollout.error_log import ErrorLog
from grpo_async.rollout.group import OpenGroup
from grpo_async.tools import Tool, ToolExecutor
from grpo_async.tracking.timeline import NO_TIMELINE, Slots, Track
from grpo_async.utils.seeds import seed_of

Rendered = dict[tuple[tuple[Origin, str], ...], IntArray]
"""Ids of the prompts of a group, by their messages."""


class ConversationProducer:
    """See the module's docstring; implements rollout.group.GroupProducer.

    Args:
        client: generates.
        renderer: renders prompts and tool results.
        settings: sampling and limits in tokens.
        max_in_flight: most rollouts at once.
        rollout_timeout_s: time limit of one rollout.
        max_result_chars: longer tool results are cut.
        errors: counts failures.
        tools: offered in every rollout.
        environments: None when the run has none.
        tracks: of the timeline; each rollout in progress has one.
    """

    def __init__(
        self,
        client: InferenceClient,
        renderer: ChatRenderer,
        settings: SamplingSettings,
        *,
        max_in_flight: int,
        rollout_timeout_s: float,
        max_result_chars: int,
        errors: ErrorLog,
        tools: Sequence[Tool] = (),
        environments: Environments | None = None,
        tracks: Slots | None = None,
    ) -> None:
        self._conversation = Conversation(client, renderer, settings)
        self._renderer = renderer
        self._slots = asyncio.Semaphore(max_in_flight)
        self._rollout_timeout_s = rollout_timeout_s
        self._max_result_chars = max_result_chars
        self._errors = errors
        self._tools = tools
        self._environments = environments
        self._tracks = NO_TIMELINE.slots("rollout") if tracks is None else tracks

    @asynccontextmanager
    async def produce(self, group: OpenGroup) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            environments: Sequence[Environment | None] = [None] * group.size
            if self._environments is not None:
                pool = self._environments.for_row(group.prompt.columns)
                leased = await stack.enter_async_context(pool.lease(group.size))
                environments, group.environments = leased, [environment.instance for environment in leased]
            rendered: Rendered = {}
            group.completions = await asyncio.gather(
                *(self._rollout(group, index, environment, rendered) for index, environment in enumerate(environments))
            )
            yield

    def _tools_with(self, environment: Environment | None) -> list[Tool]:
        return [*self._tools, *(environment.tools if environment is not None else ())]

    async def _rollout(
        self, group: OpenGroup, index: int, environment: Environment | None, rendered: Rendered
    ) -> RolloutCompletion:
        """One completion; never raises anything but cancellation."""
        tools = self._tools_with(environment)
        rollout = Rollout(
            rollout_id=f"{group.name}-r{index}",
            seed=seed_of(group.seed, index),
            affinity=f"{group.name}/{index}",
            tools=ToolExecutor(tools, max_result_chars=self._max_result_chars) if tools else None,
            tool_names=[tool.name for tool in tools],
            environment=environment,
        )
        over: RolloutCompletion | None = None
        if environment is None:
            restored = group.restored.get(index)
            if isinstance(restored, RolloutCompletion):
                return restored
            if restored is not None:
                rollout.restore(restored)
            # evaluated between two steps of the loop: when the last turn is among the turns, `over` is set too
            group.snapshots[index] = lambda: over or rollout.snapshot()
        began, started_at = time.monotonic(), time.time()
        try:
            # Those in the slots have that limit too.
            async with self._slots, asyncio.timeout(self._rollout_timeout_s):
                began, started_at = time.monotonic(), time.time()
                with self._tracks.span("rollout", rollout=rollout.rollout_id, group=group.name) as (track, span):
                    rollout.track = track
                    if environment is not None:
                        rollout.prompt_messages = await _reset(environment, group.prompt, track)
                    if not rollout.prompt_ids.size:
                        rollout.prompt_ids = self._prompt_ids(group, rollout.prompt_messages, tools, rendered)
                    completion = await self._conversation.run(rollout, on_tokens=partial(group.received, index))
                    if environment is not None and environment.reward_name is not None:
                        with track.span("environment", call="get_reward"):
                            reward = await environment.get_reward()
                        completion = replace(completion, environment_rewards={environment.reward_name: reward})
                    span.details |= {
                        "status": str(completion.status),
                        "turns": len(completion.turns),
                        "tokens": completion.num_sampled_tokens,
                    }
        except Exception as error:  # noqa: BLE001 - this rollout's failure is its own; the group decides about the rest
            self._errors.note("rollout", error)
            message = str(error) or (
                f"no answer within rollout.rollout_timeout_s = {self._rollout_timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else type(error).__name__
            )
            completion = RolloutCompletion(
                rollout_id=rollout.rollout_id,
                prompt_ids=rollout.prompt_ids,
                turns=rollout.turns,  # what led to it
                status=RolloutStatus.FAILED,
                error=message,
                prompt_messages=rollout.prompt_messages,
            )
        else:
            if not completion.turns:
                self._errors.count("environment done at reset" if completion.done else "prompt too long")
        over = replace(completion, total_duration_s=time.monotonic() - began, started_at=started_at)
        return over

    def _prompt_ids(
        self,
        group: OpenGroup,
        messages: Sequence[TaggedMessage] | None,
        tools: Sequence[Tool],
        rendered: Rendered,
    ) -> IntArray:
        """Of the group's prompt, or of what an environment's reset made of it; rendered once for all rollouts with the same."""
        messages = messages or group.prompt.messages
        key = tuple((message.origin, message.content) for message in messages)  # all that a reset changes
        if key not in rendered:
            schemas = [tool.schema for tool in tools]
            is_conversational = group.prompt.is_conversational
            ids = self._renderer.prompt_ids(messages, is_conversational=is_conversational, tools=schemas)
            rendered[key] = np.array(ids, np.int32)
        return rendered[key]


async def _reset(environment: Environment, prompt: Prompt, track: Track) -> Sequence[TaggedMessage] | None:
    """Reset the environment; the prompt's messages with the text it returned, None if it returned none."""
    row: dict[str, Any] = {"prompt": prompt.as_given(), **prompt.columns}
    with track.span("environment", call="reset"):
        text = await environment.reset(row)
    return with_environment_text(prompt.messages, text) if text else None


def with_environment_text(messages: Sequence[TaggedMessage], text: str) -> list[TaggedMessage]:
    """Append an environment's text to the last user message; without one it becomes a new user message.

    [system "Play.", user "Begin: "] and "guess 1 to 7" -> [system "Play.", user "Begin: guess 1 to 7"]
    """
    changed = list(messages)
    for position in range(len(changed) - 1, -1, -1):
        if changed[position].role == "user":
            # of the environment now: control tokens in its text are not to be taken for control tokens
            joined = changed[position].content + text
            changed[position] = replace(changed[position], content=joined, origin=Origin.ENVIRONMENT)
            return changed
    return [*changed, TaggedMessage(role="user", content=text, origin=Origin.ENVIRONMENT)]
