"""Fakes of what a conversation talks to."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from grpo_async.buffer.group import OpenGroup
from grpo_async.chat.renderer import PolicyTurn
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, OnTokens
from grpo_async.records import FinishReason, Prompt, TaggedMessage, ToolCall, ToolCallRecord

EOS = 2
CALL = 50  # a sampled token that the fake renderer reads as a call of the tool `add`

Answer = tuple[Sequence[int], FinishReason]


def open_group(
    prompt: Prompt, *, name: str = "g0", size: int = 2, seed: int = 0, version: int = 0, **fields: Any
) -> OpenGroup:
    given = {"on_tokens": lambda count, version: None, "served_version": lambda: version, **fields}
    return OpenGroup(name=name, prompt=prompt, size=size, seed=seed, **given)


def stop(*ids: int) -> Answer:
    return ids, FinishReason.STOP


def cut(*ids: int) -> Answer:
    return ids, FinishReason.LENGTH


class FakeClient:
    """An `InferenceClient` that answers a request with `answer(request)`; an error is raised.

    Attributes:
        gate: an answer's tokens arrive at once, its end when this is set.
        tokens_before_error: so many of policy version 0 arrive before an error is raised.
    """

    def __init__(self, answer: Callable[[GenerateRequest], Generation | Exception]) -> None:
        self._answer = answer
        self.gate: asyncio.Event | None = None
        self.tokens_before_error = 0
        self.requests: list[GenerateRequest] = []

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
        partial: Generation | None = None,
    ) -> Generation:
        self.requests.append(request)
        answer, tell = self._answer(request), on_tokens or (lambda num_tokens, version: None)
        if isinstance(answer, Exception):
            if self.tokens_before_error:
                tell(self.tokens_before_error, 0)
            raise answer
        tell(len(answer.token_ids), answer.policy_versions[0])
        if self.gate is not None:
            await self.gate.wait()
        return answer


class ScriptedClient(FakeClient):
    """Answers the n-th request of every rollout with the n-th answer; the version of a token is the number of its turn."""

    def __init__(self, *turns: Answer) -> None:
        super().__init__(lambda request: _turn(turns, int(request.request_id.rpartition("-t")[2])))


def _turn(turns: Sequence[Answer], number: int) -> Generation:
    ids, reason = turns[number]
    return Generation(
        token_ids=array("i", ids),
        logprobs=array("f", [-0.1]) * len(ids),
        policy_versions=array("i", [number]) * len(ids),
        finish_reason=reason,
    )


@dataclass
class FakeRenderer:
    """One token for every character of a prompt; a suffix is [70 + number of the result, ...] and 79 for the next turn."""

    seen_tools: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)
    end_of_turn_ids: Sequence[int] = (EOS,)

    def for_row(self, columns: Mapping[str, Any]) -> Self:
        return self

    def prompt_ids(
        self,
        messages: Sequence[TaggedMessage],
        *,
        is_conversational: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        self.seen_tools.append(tools)
        return [1] * sum(len(message.content) for message in messages)

    def completion_text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def parse(
        self, token_ids: Sequence[int], *, turn: int = 0, tools: Sequence[Any] = (), opening: str | None = None
    ) -> PolicyTurn:
        text = self.completion_text(token_ids)
        calls = [
            ToolCall(tool_call_id=f"t{turn}c{position}", name="add", arguments={"a": position})
            for position, token in enumerate(token_ids)
            if token == CALL
        ]
        return PolicyTurn(text=text, content=text.replace(str(CALL), "").strip(), tool_calls=calls, parse_error=None)

    def suffix_ids(
        self, calls: Sequence[ToolCall], results: Sequence[TaggedMessage], *, is_ended: bool = True
    ) -> list[int]:
        return [*([] if is_ended else [EOS]), *(70 + number for number in range(len(results))), 79]


class FakeTools:
    """Answers every call with `result`; notes what was called."""

    schemas: Sequence[Mapping[str, Any]] = ()

    def __init__(self, result: str = "9", *, failed: bool = False) -> None:
        self._result = result
        self._failed = failed
        self.executed: list[Sequence[ToolCall]] = []

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolCallRecord]:
        self.executed.append(calls)
        return [
            ToolCallRecord(
                tool_call_id=call.tool_call_id,
                name=call.name,
                arguments=call.arguments,
                result=self._result,
                failed=self._failed,
                duration_s=0.25,
            )
            for call in calls
        ]


@dataclass
class FakeEnvironment:
    """`is_done` gives the answers in turn."""

    answers: list[bool]
    asked: int = 0

    async def is_done(self) -> bool:
        self.asked += 1
        return self.answers[self.asked - 1]
