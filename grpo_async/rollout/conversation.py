"""Runs one rollout: a loop of turns over a growing sequence of token ids.

    prompt ids -> [generate] -> output ids -> [parse, call tools] -> suffix ids -> [generate] -> ...

Invariant: token-in/token-out. The next turn's prompt is prompt ids + output ids + suffix ids; nothing sampled is decoded and
tokenised again, so nothing but the bytes of a request grows with the history. A turn without tool calls ends the rollout.

How a rollout ends (R2.5, R2.6, R3.2):

    the policy answers without a call                              finished
    the environment is done (after reset, or after a tool)         finished, done
    a turn is cut by its token limit                               truncated
    the last allowed turn calls a tool                             truncated; the call is not made
    no token is left after the tools' results                      truncated; the results are kept as messages, not as tokens
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, Self

from grpo_async.buffer.resume import PartialRollout
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.client import Generation, OnTokens
from grpo_async.inference.surface import GenerateRequest
from grpo_async.records import (
    FinishReason,
    Origin,
    RolloutCompletion,
    RolloutStatus,
    TaggedMessage,
    ToolCall,
    ToolCallRecord,
    TurnRecord,
)
from grpo_async.rollout.producer import seed_of
from grpo_async.tracking.timeline import NO_TRACK, SHORTEST_WAIT_S, Span, Track


class Generator(Protocol):
    """The inference client, as far as a conversation needs it."""

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
        partial: Generation | None = None,
    ) -> Generation: ...


class ToolUse(Protocol):
    """The tools of one rollout."""

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolCallRecord]:
        """Make the calls of one turn; one record for each, in order, failures included."""
        ...


class World(Protocol):
    """The environment of one rollout, as far as a conversation needs it."""

    async def is_done(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are sampled and where a rollout is cut."""

    temperature: float
    max_completion_tokens: int
    max_model_len: int
    max_turn_tokens: int | None = None
    max_turns: int = 1_000_000
    stop_token_ids: Sequence[int] = ()

    def turn_budget(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """max_tokens of a turn = min(turn limit, what is left of the completion budget, what fits into the model length).

        Turn limit none, budget 48, 40 used, model length 128, 100 in the context: min(8, 28) = 8.
        """
        left = self.max_completion_tokens - num_completion_tokens
        fits = self.max_model_len - num_prompt_tokens - num_completion_tokens
        budget = max(0, min(left, fits))
        return budget if self.max_turn_tokens is None else min(budget, self.max_turn_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """What one rollout begins with. `tools` None: a single turn. `prompt_messages`: see RolloutCompletion. `affinity`: what its
    requests share with others, such as "group/rollout"; see inference.router. `track`: its lane of the timeline."""

    rollout_id: str
    prompt_ids: Sequence[int]
    seed: int
    affinity: str = ""
    tools: ToolUse | None = None
    tool_names: Sequence[str] = ()
    world: World | None = None
    prompt_messages: Sequence[TaggedMessage] | None = None
    live: LiveRollout | None = None
    track: Track = NO_TRACK


@dataclass(slots=True, kw_only=True)
class LiveRollout:
    """A rollout that others look at while it runs, or that begins where a checkpoint left it: the turns that are over, and the one
    that is being generated. Without environment only: its state cannot be brought back."""

    rollout_id: str
    prompt_ids: Sequence[int] = ()
    turns: list[TurnRecord] = field(default_factory=list)
    open: Generation = field(default_factory=Generation)

    @classmethod
    def of(cls, partial: PartialRollout) -> Self:
        """Goes on where a checkpoint left it."""
        return cls(
            rollout_id=partial.rollout_id,
            prompt_ids=partial.prompt_ids,
            turns=list(partial.turns),
            open=Generation(
                token_ids=list(partial.open_ids),
                logprobs=list(partial.open_logprobs),
                policy_versions=list(partial.open_versions),
                finish_reason=partial.open_finish,
            ),
        )

    def snapshot(self) -> PartialRollout | None:
        """A copy of what there is; None before the first token."""
        if not self.turns and not self.open.token_ids:
            return None
        return PartialRollout(
            rollout_id=self.rollout_id,
            prompt_ids=self.prompt_ids,
            turns=list(self.turns),
            open_ids=list(self.open.token_ids),
            open_logprobs=list(self.open.logprobs),
            open_versions=list(self.open.policy_versions),
            open_finish=self.open.finish_reason,
        )


@dataclass(slots=True, kw_only=True)
class _Progress:
    """A rollout while it runs. `context` is prompt + completion so far."""

    context: list[int]
    num_prompt_tokens: int
    turns: list[TurnRecord] = field(default_factory=list)
    truncated: bool = False
    done: bool = False

    @classmethod
    def after(cls, prompt_ids: Sequence[int], turns: list[TurnRecord]) -> Self:
        """After these turns, to which further ones are added."""
        ids = chain.from_iterable(chain(turn.output_ids, turn.tool_response_ids) for turn in turns)
        return cls(context=[*prompt_ids, *ids], num_prompt_tokens=len(prompt_ids), turns=turns)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.context) - self.num_prompt_tokens

    def add(self, turn: TurnRecord) -> None:
        self.turns.append(turn)
        self.context += turn.output_ids
        self.context += turn.tool_response_ids


class Conversation:
    """Runs rollouts, any number at once.

    Args:
        client: generates.
        renderer: reads the policy's text and renders tool results.
        settings: sampling and limits.
    """

    def __init__(self, client: Generator, renderer: ChatRenderer, settings: SamplingSettings) -> None:
        self._client = client
        self._renderer = renderer
        self._settings = settings

    async def run(
        self, start: RolloutStart, *, on_tokens: OnTokens | None = None, turns: list[TurnRecord] | None = None
    ) -> RolloutCompletion:
        """Generate until the conversation ends or is cut.

        A prompt that leaves no room for a token gives a truncated completion without turns.

        Args:
            start: prompt, tools, environment.
            on_tokens: called as tokens arrive.
            turns: gets the turns as they are made, so that they are there when an error is raised; those of `start.live` where
                there is one.

        Raises:
            InferenceError: a generation failed.
            GrpoAsyncError: the environment's `is_done` failed, or tool results cannot be rendered.
        """
        began, started_at = time.monotonic(), time.time()
        live = start.live
        if live is not None:
            turns = live.turns
        progress = _Progress.after(start.prompt_ids, [] if turns is None else turns)
        progress.done = await _is_done(start)
        ended = progress.done
        while not ended:
            budget = self._settings.turn_budget(progress.num_prompt_tokens, progress.num_completion_tokens)
            if budget < 1:
                progress.truncated = True
                break
            request = self._request(start, progress, budget)
            with start.track.span("generate", turn=len(progress.turns)) as span:
                if live is None:
                    generation = await self._client.generate(request, on_tokens=on_tokens, affinity=start.affinity)
                else:
                    generation = await self._client.generate(
                        request, on_tokens=on_tokens, affinity=start.affinity, partial=live.open
                    )
                _record_turn(start.track, span, generation)
            ended = await self._after_generation(start, progress, generation)
            if live is not None:  # the turn is among the turns now
                live.open = Generation()
        return RolloutCompletion(
            rollout_id=start.rollout_id,
            prompt_ids=start.prompt_ids,
            turns=progress.turns,
            status=RolloutStatus.TRUNCATED if progress.truncated else RolloutStatus.FINISHED,
            truncated=progress.truncated,
            done=progress.done,
            total_duration_s=time.monotonic() - began,
            prompt_messages=start.prompt_messages,
            tool_names=start.tool_names,
            started_at=started_at,
        )

    def _request(self, start: RolloutStart, progress: _Progress, budget: int) -> GenerateRequest:
        number = len(progress.turns)
        return GenerateRequest(
            request_id=f"{start.rollout_id}-t{number}",
            token_ids=progress.context,
            max_tokens=budget,
            temperature=self._settings.temperature,
            seed=seed_of(start.seed, number),
            stop_token_ids=list(self._settings.stop_token_ids),
        )

    async def _after_generation(self, start: RolloutStart, progress: _Progress, generation: Generation) -> bool:
        """Record the turn and what follows it; returns whether the rollout is over."""
        finish_reason = generation.finish_reason or FinishReason.ABORT
        if start.tools is None:
            text = self._renderer.completion_text(generation.token_ids)
            own = TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)
            progress.add(_turn(generation, finish_reason, [own]))
            progress.truncated = finish_reason is not FinishReason.STOP
            return True
        policy_turn = self._renderer.parse(generation.token_ids, turn=len(progress.turns))
        calls = policy_turn.tool_calls
        own = TaggedMessage(
            role="assistant",
            content=policy_turn.content,
            origin=Origin.POLICY,
            tool_calls=[call.as_dict() for call in calls],
        )
        is_cut = finish_reason is not FinishReason.STOP
        is_last = len(progress.turns) + 1 >= self._settings.max_turns
        if is_cut or not calls or is_last:
            progress.add(_turn(generation, finish_reason, [own], parse_error=policy_turn.parse_error))
            progress.truncated = is_cut or bool(calls)
            return True
        began = time.monotonic()
        with start.track.span("tools", calls=[call.name for call in calls]) as span:
            records = await start.tools.execute(calls)
            span.details |= {
                "seconds": [record.duration_s for record in records],
                "failed": sum(record.failed for record in records),
            }
        execution_s = time.monotonic() - began
        results = [
            TaggedMessage(
                role="tool", content=record.result, origin=Origin.TOOL, name=call.name, tool_call_id=call.tool_call_id
            )
            for call, record in zip(calls, records, strict=True)
        ]
        progress.done = await _is_done(start)
        suffix_ids: Sequence[int] = ()
        if not progress.done:
            suffix_ids = self._renderer.suffix_ids(calls, results)
            used = progress.num_completion_tokens + len(generation.token_ids) + len(suffix_ids)
            if self._settings.turn_budget(progress.num_prompt_tokens, used) < 1:
                progress.truncated = True
                suffix_ids = ()  # nothing is generated after it: a dangling prompt would only cost training time
        progress.add(
            _turn(
                generation,
                finish_reason,
                [own, *results],
                tool_calls=records,
                tool_response_ids=suffix_ids,
                tool_execution_duration_s=execution_s,
            )
        )
        return progress.done or progress.truncated


async def _is_done(start: RolloutStart) -> bool:
    if start.world is None:
        return False
    with start.track.span("environment", call="is_done"):
        return await start.world.is_done()


def _turn(
    generation: Generation,
    finish_reason: FinishReason,
    messages: Sequence[TaggedMessage],
    *,
    parse_error: str | None = None,
    tool_calls: Sequence[ToolCallRecord] = (),
    tool_response_ids: Sequence[int] = (),
    tool_execution_duration_s: float = 0.0,
) -> TurnRecord:
    return TurnRecord(
        output_ids=generation.token_ids,
        output_logprobs=generation.logprobs,
        policy_versions=generation.policy_versions,
        finish_reason=finish_reason,
        messages=messages,
        tool_calls=tool_calls,
        tool_response_ids=tool_response_ids,
        parse_error=parse_error,
        generation_duration_s=generation.duration_s,
        tool_execution_duration_s=tool_execution_duration_s,
        started_at=generation.started_at,
    )


def _record_turn(track: Track, span: Span, generation: Generation) -> None:
    """Tell the span of a generation what came of it, and record where it waited for a server."""
    versions = generation.policy_versions
    span.details |= {"tokens": len(generation.token_ids), "finish": str(generation.finish_reason or "")}
    if versions:
        span.details |= {"version": max(versions), "oldest_version": min(versions)}
    if generation.first_token_s is not None:
        span.details["first_token_s"] = generation.first_token_s
    for start, end in generation.waits:
        if end - start >= SHORTEST_WAIT_S:
            track.add("wait for a server", start, end)
