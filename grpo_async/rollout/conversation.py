"""Runs one rollout: a loop of turns over a growing sequence of token ids.

    prompt ids -> [generate] -> output ids -> [respond: tools, environment] -> suffix ids -> [generate] -> ...

Invariant: token-in/token-out. The next turn's prompt is prompt ids + output ids + suffix ids; nothing sampled is decoded and
tokenised again. A responder that answers None ends the rollout; without tools or an environment that is after the first turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.client import Generation, OnTokens
from grpo_async.inference.surface import GenerateRequest
from grpo_async.records import (
    FinishReason,
    Origin,
    RolloutCompletion,
    RolloutStatus,
    TaggedMessage,
    ToolCallRecord,
    TurnRecord,
)


class Generator(Protocol):
    """The inference client, as far as a conversation needs it."""

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Generation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What follows a turn: messages, and the token ids that stand for them and for the next generation prompt."""

    suffix_ids: Sequence[int]
    messages: Sequence[TaggedMessage] = ()
    tool_calls: Sequence[ToolCallRecord] = ()
    done: bool = False


class Responder(Protocol):
    """Tools and environments: answers a policy's turn, or None when the conversation is over."""

    async def respond(self, text: str) -> Response | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are sampled and where a rollout is cut."""

    temperature: float
    max_completion_tokens: int
    max_model_len: int
    stop_token_ids: Sequence[int] = ()

    def turn_budget(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """max_tokens of a turn = min(what is left of the completion budget, what fits into the model length).

        Budget 48, 40 used, model length 128, 100 in the context: min(8, 28) = 8.
        """
        left = self.max_completion_tokens - num_completion_tokens
        fits = self.max_model_len - num_prompt_tokens - num_completion_tokens
        return max(0, min(left, fits))


class Conversation:
    """One rollout.

    Args:
        client: generates.
        renderer: decodes the policy's text for the responder and the records.
        settings: sampling and limits.
        responder: tools or environment; None = single turn.
    """

    def __init__(
        self,
        client: Generator,
        renderer: ChatRenderer,
        settings: SamplingSettings,
        *,
        responder: Responder | None = None,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._settings = settings
        self._responder = responder

    async def run(
        self,
        rollout_id: str,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        cache_salt: str,
        on_tokens: OnTokens | None = None,
    ) -> RolloutCompletion:
        """Generate until the conversation ends or is cut. Errors of the client pass through."""
        began = time.monotonic()
        turns: list[TurnRecord] = []
        context = list(prompt_ids)
        num_completion = 0
        truncated = done = False
        while True:
            budget = self._settings.turn_budget(len(prompt_ids), num_completion)
            if budget < 1:
                truncated = True
                break
            request = GenerateRequest(
                request_id=f"{rollout_id}-t{len(turns)}",
                token_ids=context,
                max_tokens=budget,
                temperature=self._settings.temperature,
                seed=(seed + len(turns)) & 0x7FFFFFFF,
                stop_token_ids=list(self._settings.stop_token_ids),
                cache_salt=cache_salt,
            )
            generation = await self._client.generate(request, on_tokens=on_tokens)
            turn, response = await self._finish_turn(generation)
            turns.append(turn)
            context += [*turn.output_ids, *turn.tool_response_ids]
            num_completion += len(turn.output_ids) + len(turn.tool_response_ids)
            if turn.finish_reason is not FinishReason.STOP:
                truncated = True
                break
            if response is None or response.done:
                done = response is not None
                break
        return RolloutCompletion(
            rollout_id=rollout_id,
            prompt_ids=prompt_ids,
            turns=turns,
            status=RolloutStatus.TRUNCATED if truncated else RolloutStatus.FINISHED,
            truncated=truncated,
            done=done,
            total_duration_s=time.monotonic() - began,
        )

    async def _finish_turn(self, generation: Generation) -> tuple[TurnRecord, Response | None]:
        """Decode the turn, and ask the responder unless the turn was cut."""
        text = self._renderer.completion_text(generation.token_ids)
        finish_reason = generation.finish_reason or FinishReason.ABORT
        began = time.monotonic()
        response = None
        if self._responder is not None and finish_reason is FinishReason.STOP:
            response = await self._responder.respond(text)
        own = TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)
        turn = TurnRecord(
            output_ids=generation.token_ids,
            output_logprobs=generation.logprobs,
            policy_versions=generation.policy_versions,
            finish_reason=finish_reason,
            messages=[own, *(response.messages if response else ())],
            tool_calls=response.tool_calls if response else (),
            # when the episode is over nothing is generated after the suffix, so it is not kept
            tool_response_ids=response.suffix_ids if response and not response.done else (),
            generation_duration_s=generation.duration_s,
            tool_execution_duration_s=time.monotonic() - began if response else 0.0,
        )
        return turn, response
