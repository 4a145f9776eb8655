"""Runs one rollout: a loop of turns over a growing sequence of token ids.

    prompt ids -> [generate] -> output ids -> [parse, call tools] -> suffix ids -> [generate] -> ...

Invariant: nothing sampled is decoded and tokenized again. Text that a stop string ended keeps all of its tokens, and tool calls are
parsed from all of them; only the message's text is cut.

How a rollout ends:

    the policy answers without a call                              finished
    the environment is done (after reset, or after a tool)         finished, done
    a turn is cut by its token limit                               truncated
    the last allowed turn calls a tool                             truncated; the call is not made
    no token is left after the tools' results                      truncated; the results are kept as messages, not as tokens

`ConversationProducer` runs the rollouts of a group at the same time. Whatever one does (fails, hangs, is cancelled), its slot
is free again, its environment's instance goes back to the pool or is discarded, and the others of the group are not touched.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from grpo_async.buffer.group import OpenGroup
from grpo_async.buffer.resume import PartialRollout
from grpo_async.chat.renderer import ChatRenderer, opening_of
from grpo_async.envs import Environment, Environments
from grpo_async.errors import message_of
from grpo_async.inference.client import Generation, InferenceClient, OnTokens
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import (
    FinishReason,
    IntArray,
    Origin,
    Prompt,
    RolloutCompletion,
    RolloutStatus,
    TaggedMessage,
    TokenPath,
    TurnRecord,
    no_tokens,
    top_array,
)
from grpo_async.rollout.group import ErrorLog
from grpo_async.tools import Tool, ToolExecutor, tools_of_row
from grpo_async.tracking.timeline import span
from grpo_async.utils.seeds import seed_of


@dataclass(slots=True, kw_only=True)
class Rollout(TokenPath):
    """One rollout while it runs. Its turns stay readable after it fails, and a checkpoint can take a `snapshot` at any moment."""

    client: InferenceClient
    renderer: ChatRenderer
    settings: SamplingSettings
    rollout_id: str
    seed: int
    on_tokens: OnTokens | None = None
    prompt_ids: IntArray = field(default_factory=no_tokens)
    prompt_messages: Sequence[TaggedMessage] | None = None  # where they differ from the group's
    opening: str | None = None  # the beginning of the first turn, where the prompt has it
    tools: ToolExecutor | None = None  # None for a single-turn rollout
    tool_names: Sequence[str] = ()
    environment: Environment | None = None
    affinity: str = ""  # see inference.router
    turns: list[TurnRecord] = field(default_factory=list)
    # the turn that is being generated, or whose tools are being called
    open_turn: Generation = field(default_factory=Generation)
    is_truncated: bool = False
    is_done: bool = False  # as the environment says

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(turn.output_ids) + len(turn.tool_response_ids) for turn in self.turns)

    @property
    def context(self) -> list[int]:
        """Prompt + completion so far, for a request."""
        ids: list[int] = np.concatenate([self.prompt_ids, self.completion_ids]).tolist()
        return ids

    def add(self, turn: TurnRecord) -> None:
        self.turns.append(turn)
        self.open_turn = Generation()

    def snapshot(self) -> PartialRollout | None:
        """A copy of the current state; None before the first token."""
        if not self.turns and not self.open_turn.token_ids:
            return None
        return PartialRollout(
            rollout_id=self.rollout_id,
            prompt_ids=self.prompt_ids,
            turns=list(self.turns),
            open_ids=np.array(self.open_turn.token_ids, np.int32),
            open_logprobs=np.array(self.open_turn.logprobs, np.float32),
            open_versions=np.array(self.open_turn.policy_versions, np.int32),
            open_top=top_array(bytes(self.open_turn.top), len(self.open_turn.token_ids)),
            open_finish=self.open_turn.finish_reason,
            open_stop_reason=self.open_turn.stop_reason,
        )

    def restore(self, partial: PartialRollout) -> None:
        """Continue where a checkpoint left it."""
        self.prompt_ids, self.turns = partial.prompt_ids, list(partial.turns)
        self.open_turn = Generation(
            token_ids=array("i", partial.open_ids.tobytes()),
            logprobs=array("f", partial.open_logprobs.tobytes()),
            policy_versions=array("i", partial.open_versions.tobytes()),
            top=bytearray() if partial.open_top is None else bytearray(partial.open_top.tobytes()),
            finish_reason=partial.open_finish,
            stop_reason=partial.open_stop_reason,
        )

    async def run(self) -> RolloutCompletion:
        """Generate until the conversation ends. A prompt that leaves no room for a token gives a truncated completion without
        turns."""
        self.is_done = await self._is_done()
        is_over = self.is_done
        while not is_over:
            budget = self._budget(self.num_completion_tokens)
            if budget < 1:
                self.is_truncated = True
                break
            number = len(self.turns)
            request = self.settings.request(
                request_id=f"{self.rollout_id}-t{number}",
                token_ids=self.context,
                max_tokens=budget,
                seed=seed_of(self.seed, number),
            )
            with span("generate", turn=number) as details:
                generation = await self.client.generate(
                    request, on_tokens=self.on_tokens, affinity=self.affinity, partial=self.open_turn
                )
                generation.note(details)
            is_over = await self._after_generation(generation)
        return RolloutCompletion(
            rollout_id=self.rollout_id,
            prompt_ids=self.prompt_ids,
            turns=self.turns,
            status=RolloutStatus.TRUNCATED if self.is_truncated else RolloutStatus.FINISHED,
            done=self.is_done,
            prompt_messages=self.prompt_messages,
            tool_names=self.tool_names,
        )

    async def _after_generation(self, generation: Generation) -> bool:
        """Add the turn and what follows it; returns whether the rollout is over."""
        is_cut = generation.finish_reason is not FinishReason.STOP
        if self.tools is None:
            text = self.settings.shown(self.renderer.completion_text(generation.token_ids))
            own = TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)
            self.add(generation.turn([own]))
            self.is_truncated = is_cut
            return True
        number = len(self.turns)
        policy_turn = self.renderer.parse(
            generation.token_ids, turn=number, tools=self.tools.schemas, opening=None if number else self.opening
        )
        calls = policy_turn.tool_calls
        own = TaggedMessage(
            role="assistant",
            content=self.settings.shown(policy_turn.content),
            origin=Origin.POLICY,
            tool_calls=[call.as_dict() for call in calls],
        )
        if is_cut or not calls or number + 1 >= self.settings.max_turns:
            self.add(generation.turn([own], parse_error=policy_turn.parse_error))
            self.is_truncated = is_cut or bool(calls)
            return True
        began = time.monotonic()
        with span("tools", calls=[call.name for call in calls]) as details:
            records = await self.tools.execute(calls)
            details["seconds"] = [record.duration_s for record in records]
            details["failed"] = sum(record.failed for record in records)
        execution_s = time.monotonic() - began
        results = [call.result_message(record.result) for call, record in zip(calls, records, strict=True)]
        self.is_done = await self._is_done()
        suffix_ids: Sequence[int] = ()
        if not self.is_done:
            is_ended = generation.token_ids[-1] in self.settings.stop_token_ids
            suffix_ids = self.renderer.suffix_ids(calls, results, is_ended=is_ended)
            used = self.num_completion_tokens + len(generation.token_ids) + len(suffix_ids)
            if self._budget(used) < 1:
                self.is_truncated = True
                suffix_ids = ()  # nothing is generated after it: a dangling prompt would only cost training time
        self.add(
            generation.turn(
                [own, *results],
                tool_calls=records,
                tool_response_ids=np.array(suffix_ids, np.int32),
                tool_execution_duration_s=execution_s,
            )
        )
        return self.is_done or self.is_truncated

    def _budget(self, num_used: int) -> int:
        return self.settings.turn_budget(len(self.prompt_ids) + num_used, num_used=num_used)

    async def _is_done(self) -> bool:
        if self.environment is None:
            return False
        with span("environment", call="is_done"):
            return await self.environment.is_done()


Rendered = dict[tuple[tuple[Origin, str], ...], IntArray]  # token ids of the prompts of a group, by their messages


class ConversationProducer:
    """See the module's docstring; implements rollout.group.GroupProducer."""

    def __init__(
        self,
        client: InferenceClient,
        renderer: ChatRenderer,
        settings: SamplingSettings,
        *,
        slots: asyncio.Semaphore,
        rollout_timeout_s: float,
        max_result_chars: int,
        errors: ErrorLog,
        tools: Sequence[Tool] = (),
        environments: Environments | None = None,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._settings = settings
        self._slots = slots
        self._rollout_timeout_s = rollout_timeout_s
        self._max_result_chars = max_result_chars
        self._errors = errors
        self._tools = tools
        self._environments = environments

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

    async def _rollout(
        self, group: OpenGroup, index: int, environment: Environment | None, rendered: Rendered
    ) -> RolloutCompletion:
        """Make one completion. Raises nothing but cancellation."""
        tools = [
            *tools_of_row(self._tools, group.prompt.columns),
            *(environment.tools if environment is not None else ()),
        ]
        rollout = Rollout(
            client=self._client,
            renderer=self._renderer.for_row(group.prompt.columns),
            settings=replace(self._settings, temperature=group.prompt.temperature or self._settings.temperature),
            on_tokens=partial(group.received, index),
            rollout_id=group.rollout_id(index),
            seed=seed_of(group.seed, index),
            affinity=f"{group.name}/{index}",
            tools=ToolExecutor(tools, max_result_chars=self._max_result_chars) if tools else None,
            tool_names=[tool.name for tool in tools],
            environment=environment,
        )
        result: RolloutCompletion | None = None
        if environment is None:
            restored = group.restored.get(index)
            if isinstance(restored, RolloutCompletion):
                return restored
            if restored is not None:
                rollout.restore(restored)
            # evaluated between two steps of the loop: when the last turn is among the turns, `result` is set too
            group.snapshots[index] = lambda: result or rollout.snapshot()
        began, started_at = time.monotonic(), time.time()
        limit = asyncio.timeout(self._rollout_timeout_s)
        try:
            # the wait for a slot needs no limit of its own: the rollouts that hold them have one
            async with self._slots, limit:
                began, started_at = time.monotonic(), time.time()
                with span("rollout", rollout=rollout.rollout_id, group=group.name) as details:
                    if environment is not None:
                        rollout.prompt_messages = await _reset(environment, group.prompt)
                    if not rollout.prompt_ids.size:
                        rollout.prompt_ids = self._prompt_ids(group, rollout.prompt_messages, tools, rendered)
                    rollout.opening = opening_of(rollout.prompt_messages or group.prompt.messages)
                    completion = await rollout.run()
                    if environment is not None and (name := environment.kind.reward_name) is not None:
                        with span("environment", call="get_reward"):
                            reward = await environment.get_reward()
                        completion = replace(completion, environment_rewards={name: reward})
                    details |= {
                        "status": str(completion.status),
                        "turns": len(completion.turns),
                        "tokens": completion.num_sampled_tokens,
                    }
        except Exception as error:  # noqa: BLE001 - only this rollout fails; the group decides about the others
            self._errors.note("rollout", error)
            message = message_of(error)
            if limit.expired():  # a library's own timeout raises the same type
                message = f"no answer within rollout.rollout_timeout_s = {self._rollout_timeout_s:g} s"
            completion = RolloutCompletion(
                rollout_id=rollout.rollout_id,
                prompt_ids=rollout.prompt_ids,
                turns=rollout.turns,  # the turns before the failure
                status=RolloutStatus.FAILED,
                error=message,
                prompt_messages=rollout.prompt_messages,
            )
        else:
            if not completion.turns:
                self._errors.count("environment done at reset" if completion.done else "prompt too long")
        result = replace(completion, total_duration_s=time.monotonic() - began, started_at=started_at)
        return result

    def _prompt_ids(
        self,
        group: OpenGroup,
        messages: Sequence[TaggedMessage] | None,
        tools: Sequence[Tool],
        rendered: Rendered,
    ) -> IntArray:
        """Render the group's prompt, or the messages that an environment's reset made of it; equal messages are rendered once."""
        messages = messages or group.prompt.messages
        key = tuple((message.origin, message.content) for message in messages)  # a reset changes nothing else
        if key not in rendered:
            schemas = [tool.schema for tool in tools]
            is_conversational = group.prompt.is_conversational or bool(self._tools)  # text too, where a row has none
            renderer = self._renderer.for_row(group.prompt.columns)
            ids = renderer.prompt_ids(messages, is_conversational=is_conversational, tools=schemas)
            rendered[key] = np.array(ids, np.int32)
        return rendered[key]


async def _reset(environment: Environment, prompt: Prompt) -> Sequence[TaggedMessage] | None:
    """Reset the environment. Returns the prompt's messages with the environment's text, None if it gave none."""
    row: dict[str, Any] = {"prompt": prompt.as_given(), **prompt.columns}
    with span("environment", call="reset"):
        text = await environment.reset(row)
    return with_environment_text(prompt.messages, text) if text else None


def with_environment_text(messages: Sequence[TaggedMessage], text: str) -> list[TaggedMessage]:
    """Append an environment's text to the last user message; without one it becomes a new user message.

    [system "Play.", user "Begin: "] and "guess 1 to 7" -> [system "Play.", user "Begin: guess 1 to 7"]
    """
    changed = list(messages)
    for position in range(len(changed) - 1, -1, -1):
        if changed[position].role == "user":
            # now from the environment, so control tokens in its text stay plain text
            content = changed[position].content + text
            changed[position] = replace(changed[position], content=content, origin=Origin.ENVIRONMENT)
            return changed
    return [*changed, TaggedMessage(role="user", content=text, origin=Origin.ENVIRONMENT)]
