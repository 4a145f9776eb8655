"""A conversation that goes on from a checkpoint: from its tokens, never from its text."""

from __future__ import annotations

import asyncio

from grpo_async.buffer.resume import PartialRollout
from grpo_async.inference.client import Generation, OnTokens
from grpo_async.inference.surface import GenerateRequest
from grpo_async.records import FinishReason, RolloutCompletion
from grpo_async.rollout.conversation import Conversation, LiveRollout, RolloutStart, SamplingSettings
from tests.rollout.fakes import CALL, EOS, Answer, FakeRenderer, FakeTools, ScriptedClient, cut, stop


class _Client(ScriptedClient):
    """Goes on from `partial`, as the real one; `seen` is what there was of the rollout while a turn was generated."""

    def __init__(self, *turns: Answer) -> None:
        super().__init__(*turns)
        self.live: LiveRollout | None = None
        self.seen: list[PartialRollout | None] = []
        self.begun: list[list[int]] = []

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
        partial: Generation | None = None,
    ) -> Generation:
        assert partial is not None
        self.begun.append(list(partial.token_ids))
        if partial.finish_reason is not None:
            return partial
        rest = await super().generate(request, on_tokens=on_tokens, affinity=affinity)
        assert rest.token_ids[: len(partial.token_ids)] == partial.token_ids
        partial.token_ids[:], partial.logprobs[:] = rest.token_ids, rest.logprobs
        partial.policy_versions[:] = rest.policy_versions
        if self.live is not None:
            self.seen.append(self.live.snapshot())
        partial.finish_reason = rest.finish_reason
        return partial


def _run(client: _Client, live: LiveRollout, tools: FakeTools | None = None) -> RolloutCompletion:
    client.live = live
    live.prompt_ids = (10, 11)
    settings = SamplingSettings(temperature=1.0, max_completion_tokens=100, max_model_len=200, stop_token_ids=[EOS])
    start = RolloutStart(rollout_id="r", prompt_ids=(10, 11), seed=5, tools=tools, tool_names=["add"], live=live)
    return asyncio.run(Conversation(client, FakeRenderer(), settings).run(start))  # type: ignore[arg-type]


TURNS = (stop(5, CALL, EOS), stop(6, 7, EOS))


def test_it_can_be_looked_at_in_every_turn() -> None:
    client = _Client(*TURNS)
    live = LiveRollout(rollout_id="r")
    assert live.snapshot() is None
    _run(client, live, FakeTools())
    first, second = client.seen
    assert first is not None
    assert second is not None
    assert (list(first.turns), list(first.open_ids)) == ([], [5, CALL, EOS])
    assert [list(turn.output_ids) for turn in second.turns] == [[5, CALL, EOS]]
    assert (list(second.open_ids), list(second.open_versions)) == ([6, 7, EOS], [1, 1, 1])


def test_a_copy_of_each_moment_leads_to_the_same_end() -> None:
    client = _Client(*TURNS)
    live = LiveRollout(rollout_id="r")
    whole = _run(client, live, FakeTools())
    for moment in client.seen:
        assert moment is not None
        tools = FakeTools()
        again = _Client(*TURNS)
        resumed = _run(again, LiveRollout.of(moment), tools)
        assert resumed.completion_ids == whole.completion_ids
        assert resumed.logprobs == whole.logprobs
        assert resumed.completion_mask == whole.completion_mask
        assert [request.seed for request in again.requests] == [r.seed for r in client.requests[-len(again.requests) :]]
        assert len(tools.executed) == 1 - len(moment.turns)  # a call that was answered is not made again


def test_a_turn_that_was_whole_is_not_generated_again_but_its_tools_are_called() -> None:
    partial = PartialRollout(
        rollout_id="r", prompt_ids=[10, 11], open_ids=[5, CALL, EOS], open_logprobs=[-0.1] * 3, open_versions=[0] * 3,
        open_finish=FinishReason.STOP,
    )  # fmt: skip
    client, tools = _Client(*TURNS), FakeTools()
    completion = _run(client, LiveRollout.of(partial), tools)
    assert len(tools.executed) == 1
    assert [request.request_id for request in client.requests] == ["r-t1"]
    assert client.requests[0].token_ids == [10, 11, 5, CALL, EOS, 70, 79]
    assert completion.completion_ids == [5, CALL, EOS, 70, 79, 6, 7, EOS]


def test_the_budget_counts_what_was_there_before() -> None:
    partial = PartialRollout(rollout_id="r", prompt_ids=[10, 11], open_ids=[5], open_logprobs=[-0.1], open_versions=[0])
    client = _Client(cut(5, 6))
    completion = _run(client, LiveRollout.of(partial))
    assert client.requests[0].max_tokens == 100  # the client takes off what there is of the turn
    assert completion.truncated
