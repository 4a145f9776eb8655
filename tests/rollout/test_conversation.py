"""One rollout: turns over token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpo_async.inference.client import Generation, OnTokens
from grpo_async.inference.surface import GenerateRequest
from grpo_async.records import FinishReason, Origin, RolloutCompletion, RolloutStatus, TaggedMessage
from grpo_async.rollout.conversation import Conversation, Response, SamplingSettings


class _Client:
    """Answers the n-th request with the n-th (ids, finish reason)."""

    def __init__(self, *turns: tuple[Sequence[int], FinishReason]) -> None:
        self._turns = list(turns)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Generation:
        self.requests.append(request)
        ids, reason = self._turns[len(self.requests) - 1]
        return Generation(
            token_ids=list(ids),
            logprobs=[-0.1] * len(ids),
            policy_versions=[len(self.requests)] * len(ids),
            finish_reason=reason,
        )


class _Renderer:
    def completion_text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class _Responder:
    def __init__(self, *responses: Response | None) -> None:
        self._responses = list(responses)
        self.texts: list[str] = []

    async def respond(self, text: str) -> Response | None:
        self.texts.append(text)
        return self._responses.pop(0)


def _run(client: _Client, responder: _Responder | None = None, **limits: int) -> RolloutCompletion:
    settings = SamplingSettings(
        temperature=1.0, **{"max_completion_tokens": 100, "max_model_len": 200, **limits}, stop_token_ids=[2]
    )
    conversation = Conversation(client, _Renderer(), settings, responder=responder)  # type: ignore[arg-type]
    return asyncio.run(conversation.run("r", [10, 11], seed=5, cache_salt="3"))


def _tool(*suffix: int, done: bool = False) -> Response:
    message = TaggedMessage(role="tool", content="9", origin=Origin.TOOL)
    return Response(suffix_ids=suffix, messages=[message], done=done)


def test_a_single_turn_ends_with_its_stop_token() -> None:
    client = _Client(([5, 2], FinishReason.STOP))
    completion = _run(client)
    assert completion.status is RolloutStatus.FINISHED
    assert completion.completion_ids == [5, 2]
    assert not completion.truncated
    assert not completion.done
    assert [message.content for message in completion.completion_messages()] == ["5 2"]
    assert client.requests[0].cache_salt == "3"
    assert client.requests[0].stop_token_ids == [2]


def test_the_next_turn_continues_the_ids_and_never_re_tokenises() -> None:
    """R4.5: next prompt ids = prompt ids + output ids + suffix ids."""
    client = _Client(([5, 2], FinishReason.STOP), ([6, 2], FinishReason.STOP))
    responder = _Responder(_tool(70, 71), None)
    completion = _run(client, responder)
    assert client.requests[1].token_ids == [10, 11, 5, 2, 70, 71]
    assert client.requests[1].seed != client.requests[0].seed
    assert completion.completion_ids == [5, 2, 70, 71, 6, 2]
    assert completion.completion_mask == [1, 1, 0, 0, 1, 1]
    assert responder.texts == ["5 2", "6 2"]


def test_a_turn_cut_by_length_truncates_and_is_not_answered() -> None:
    """R2.5: truncated if and only if generation was cut."""
    responder = _Responder()
    completion = _run(_Client(([5, 6], FinishReason.LENGTH)), responder)
    assert completion.truncated
    assert completion.status is RolloutStatus.TRUNCATED
    assert responder.texts == []


def test_the_budget_of_a_turn_is_the_least_of_what_is_left() -> None:
    """R6.4: budget 10, 4 tokens used -> 6; model length 12, 6 in the context -> 6."""
    for limits in ({"max_completion_tokens": 10}, {"max_model_len": 12}):
        client = _Client(([5, 2], FinishReason.STOP), ([6, 2], FinishReason.STOP))
        _run(client, _Responder(_tool(70, 71), None), **limits)
        assert client.requests[1].max_tokens == 6


def test_a_spent_budget_truncates_without_another_request() -> None:
    client = _Client(([5, 2], FinishReason.STOP))
    completion = _run(client, _Responder(_tool(70, 71)), max_completion_tokens=4)
    assert completion.truncated
    assert len(client.requests) == 1


def test_a_finished_environment_ends_the_rollout_without_a_dangling_suffix() -> None:
    """R3.2, R3.5: done and truncated are separate; no generation prompt is kept when nothing follows."""
    completion = _run(_Client(([5, 2], FinishReason.STOP)), _Responder(_tool(70, 71, done=True)))
    assert completion.done
    assert not completion.truncated
    assert completion.completion_ids == [5, 2]
    assert [message.content for message in completion.completion_messages()] == ["5 2", "9"]
