"""Makes groups of conversations: leases environments, renders prompts, runs the rollouts of a group at the same time.

Invariant: whatever a rollout does (fails, hangs, is cancelled), its slot is free again and its environment instance goes back
to the pool or is discarded; a rollout that fails is that rollout's affair.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.envs import Environment, Environments
from grpo_async.records import Origin, Prompt, RolloutCompletion, RolloutStatus, TaggedMessage, TurnRecord
from grpo_async.rollout.conversation import Conversation, LiveRollout, RolloutStart
from grpo_async.rollout.error_log import ErrorLog
from grpo_async.rollout.producer import GroupRequest, Produced, seed_of
from grpo_async.tools import Tool, ToolExecutor
from grpo_async.tracking.timeline import NO_TIMELINE, Slots, Track


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """Limits that are not a matter of tokens."""

    max_in_flight: int
    rollout_timeout_s: float
    max_result_chars: int


class ConversationProducer:
    """See the module's docstring; implements rollout.producer.GroupProducer.

    Args:
        conversation: runs one rollout.
        renderer: renders prompts.
        tools: offered in every rollout.
        environments: None when the run has none.
        errors: counts failures.
        lanes: of the timeline; each rollout in progress has one.
    """

    def __init__(
        self,
        conversation: Conversation,
        renderer: ChatRenderer,
        *,
        limits: ConversationLimits,
        errors: ErrorLog,
        tools: Sequence[Tool] = (),
        environments: Environments | None = None,
        lanes: Slots | None = None,
    ) -> None:
        self._lanes = NO_TIMELINE.slots("rollout") if lanes is None else lanes
        self._conversation = conversation
        self._renderer = renderer
        self._limits = limits
        self._errors = errors
        self._tools = tools
        self._environments = environments
        self._slots = asyncio.Semaphore(limits.max_in_flight)

    @asynccontextmanager
    async def produce(self, request: GroupRequest) -> AsyncIterator[Produced]:
        async with AsyncExitStack() as stack:
            environments: Sequence[Environment | None] = [None] * request.size
            if self._environments is not None:
                pool = self._environments.for_row(request.prompt.columns)
                environments = await stack.enter_async_context(pool.lease(request.size))
            group = _Group(request, self._tools_with(environments[0]), self._renderer)
            completions = await asyncio.gather(
                *(self._rollout(group, index, environment) for index, environment in enumerate(environments))
            )
            instances = None
            if self._environments is not None:
                instances = [environment.instance for environment in environments if environment is not None]
            yield Produced(completions=completions, environments=instances)

    def _tools_with(self, environment: Environment | None) -> list[Tool]:
        return [*self._tools, *(environment.tools if environment is not None else ())]

    async def _rollout(self, group: _Group, index: int, environment: Environment | None) -> RolloutCompletion:
        """One completion; never raises anything but cancellation."""
        rollout_id = f"{group.request.name}-r{index}"
        prompt_ids: Sequence[int] = ()
        messages: Sequence[TaggedMessage] | None = None
        turns: list[TurnRecord] = []
        live: LiveRollout | None = None
        over: RolloutCompletion | None = None
        progress = group.request.progress
        if progress is not None and environment is None:
            restored = progress.restored.get(index)
            if isinstance(restored, RolloutCompletion):
                return restored
            live = LiveRollout(rollout_id=rollout_id) if restored is None else LiveRollout.of(restored)
            turns = live.turns
            seen = live
            # evaluated between two steps of the loop: when the last turn is among the turns, `over` is set too
            progress.snapshots[index] = lambda: over or seen.snapshot()
        began, started_at = time.monotonic(), time.time()
        try:
            # Those in the slots have that limit too.
            async with self._slots, asyncio.timeout(self._limits.rollout_timeout_s):  # for rollouts with limits
                began, started_at = time.monotonic(), time.time()
                with self._lanes.span("rollout", rollout=rollout_id, group=group.request.name) as (track, span):
                    messages = None if environment is None else await _reset(environment, group.request.prompt, track)
                    if live is not None:
                        prompt_ids = live.prompt_ids = live.prompt_ids or group.prompt_ids(messages)
                    else:
                        prompt_ids = group.prompt_ids(messages)
                    completion = await self._run(
                        group, index, rollout_id, environment, messages, prompt_ids, turns, live, track
                    )
                    span.details |= {
                        "status": str(completion.status),
                        "turns": len(completion.turns),
                        "tokens": completion.num_sampled_tokens,
                    }
        except Exception as error:  # noqa: BLE001 - this rollout's failure is its own; the group decides about the rest
            self._errors.note("rollout", error)
            message = str(error) or (
                f"no answer within rollout.rollout_timeout_s = {self._limits.rollout_timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else type(error).__name__
            )
            over = RolloutCompletion(
                rollout_id=rollout_id,
                prompt_ids=prompt_ids,
                turns=turns,  # what led to it
                status=RolloutStatus.FAILED,
                error=message,
                total_duration_s=time.monotonic() - began,
                prompt_messages=messages,
                started_at=started_at,
            )
            return over
        if not completion.turns:
            self._errors.count("environment done at reset" if completion.done else "prompt too long")
        over = replace(completion, total_duration_s=time.monotonic() - began, started_at=started_at)
        return over

    async def _run(
        self,
        group: _Group,
        index: int,
        rollout_id: str,
        environment: Environment | None,
        messages: Sequence[TaggedMessage] | None,
        prompt_ids: Sequence[int],
        turns: list[TurnRecord],
        live: LiveRollout | None,
        track: Track,
    ) -> RolloutCompletion:
        request = group.request
        tools = self._tools_with(environment)
        on_tokens = request.on_tokens
        completion = await self._conversation.run(
            RolloutStart(
                rollout_id=rollout_id,
                prompt_ids=prompt_ids,
                seed=seed_of(request.seed, index),
                affinity=f"{request.name}/{index}",
                tools=ToolExecutor(tools, max_result_chars=self._limits.max_result_chars) if tools else None,
                tool_names=[tool.name for tool in tools],
                world=environment,
                prompt_messages=messages,
                live=live,
                track=track,
            ),
            on_tokens=None if on_tokens is None else lambda count, version: on_tokens(index, count, version),
            turns=turns,
        )
        if environment is None or environment.reward_name is None:
            return completion
        with track.span("environment", call="get_reward"):
            reward = await environment.get_reward()
        return replace(completion, environment_rewards={environment.reward_name: reward})


class _Group:
    """The prompt of a group, rendered once for all rollouts whose messages are the same."""

    def __init__(self, request: GroupRequest, tools: Sequence[Tool], renderer: ChatRenderer) -> None:
        self.request = request
        self._schemas = [tool.schema for tool in tools]
        self._renderer = renderer
        self._rendered: dict[tuple[tuple[Origin, str], ...], list[int]] = {}

    def prompt_ids(self, messages: Sequence[TaggedMessage] | None) -> list[int]:
        prompt = self.request.prompt
        messages = messages or prompt.messages
        key = tuple(
            (message.origin, message.content) for message in messages
        )  # all that an environment's reset changes
        found = self._rendered.get(key)
        if found is None:
            found = self._rendered[key] = self._renderer.prompt_ids(
                messages, is_conversational=prompt.is_conversational, tools=self._schemas
            )
        return found


async def _reset(environment: Environment, prompt: Prompt, track: Track) -> Sequence[TaggedMessage] | None:
    """Reset the environment; the prompt's messages with the text it returned, None if it returned none."""
    row: dict[str, Any] = {"prompt": prompt.as_given(), **prompt.columns}
    with track.span("environment", call="reset"):
        text = await environment.reset(row)
    return with_environment_text(prompt.messages, text) if text else None


def with_environment_text(messages: Sequence[TaggedMessage], text: str) -> list[TaggedMessage]:
    """Append an environment's text to the last user message; without one it becomes a user message of its own.

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
