"""One rollout: turns over token ids, and every way in which it can end."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from grpo_async.buffer.resume import PartialRollout
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import TOP, FinishReason, Origin, RolloutCompletion, RolloutStatus, ToolCall
from grpo_async.rollout.conversation import Rollout
from tests.rollout.fakes import CALL, EOS, Answer, FakeEnvironment, FakeRenderer, FakeTools, ScriptedClient, cut, stop


def _run(client: ScriptedClient, *given: Any, **limits: Any) -> RolloutCompletion:
    return asyncio.run(_rollout(client, *given, **limits).run())


def _rollout(
    client: ScriptedClient, tools: FakeTools | None = None, environment: FakeEnvironment | None = None, **limits: Any
) -> Rollout:
    settings = SamplingSettings(
        **{"temperature": 1.0, "max_completion_tokens": 100, "max_model_len": 200, **limits}, stop_token_ids=[EOS]
    )
    given: Any = {"client": client, "renderer": FakeRenderer(), "tools": tools, "environment": environment}
    names = ["add"] if tools else []
    return Rollout(**given, settings=settings, rollout_id="r", seed=5, prompt_ids=(10, 11), tool_names=names)


def test_the_next_turn_continues_the_ids_and_only_what_was_sampled_has_mask_logprob_and_version() -> None:
    """R4.5: next prompt ids = prompt ids + output ids + suffix ids.

    R2.1, R2.2, R4.7: sampled tokens have mask 1 and a real logprob, tool tokens mask 0 and 0.0."""
    client = ScriptedClient(stop(5, CALL, EOS), stop(6, EOS))
    tools = FakeTools()
    completion = _run(client, tools)
    assert client.requests[1].token_ids == [10, 11, 5, CALL, EOS, 70, 79]
    assert client.requests[1].seed != client.requests[0].seed
    assert completion.completion_ids.tolist() == [5, CALL, EOS, 70, 79, 6, EOS]
    assert completion.completion_mask.tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert completion.logprobs.tolist() == pytest.approx([-0.1] * 3 + [0.0] * 2 + [-0.1] * 2)
    assert completion.policy_versions.tolist() == [0, 0, 0, -1, -1, 1, 1]
    assert tools.executed == [[ToolCall(tool_call_id="t0c1", name="add", arguments={"a": 1})]]


def test_a_completion_has_each_of_its_messages_once_and_not_the_prompt() -> None:
    """R2.3, R2.4: completion_messages has no prompt, trajectory lists each message once."""
    completion = _run(ScriptedClient(stop(5, CALL, EOS), stop(6, EOS)), FakeTools("9"))
    assert [(m.role, m.content, m.origin) for m in completion.completion_messages()] == [
        ("assistant", "5  2", Origin.POLICY),
        ("tool", "9", Origin.TOOL),
        ("assistant", "6 2", Origin.POLICY),
    ]
    assistant, tool, _ = completion.completion_messages()
    assert assistant.as_dict()["tool_calls"] == [
        {"id": "t0c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert (tool.name, tool.tool_call_id) == ("add", "t0c1")


def test_a_stop_string_ends_the_text_and_not_the_tokens() -> None:
    """It ends before the string; all tokens are trained, and the rollout is whole."""
    client = ScriptedClient(stop(5, 6, 7, 8))
    completion = _run(client, stop=["7 8"])
    assert client.requests[0].stop == ["7 8"]
    assert [message.content for message in completion.completion_messages()] == ["5 6 "]
    assert (completion.completion_ids.tolist(), completion.truncated) == ([5, 6, 7, 8], False)


def test_calls_are_read_from_all_that_was_sampled_and_a_turn_that_a_stop_string_ended_is_closed() -> None:
    """ "50 9" is a call and the string that ends it; the next turn begins behind the template's own end of the turn."""
    client, tools = ScriptedClient(stop(5, CALL, 9), stop(6, EOS)), FakeTools()
    completion = _run(client, tools, stop=["50 9", " 9"])
    assert len(tools.executed) == 1
    assert client.requests[1].token_ids == [10, 11, 5, CALL, 9, EOS, 70, 79]
    assert completion.completion_mask.tolist() == [1, 1, 1, 0, 0, 0, 1, 1]
    assert completion.completion_messages()[0].content == "5 "


def test_a_turn_cut_by_length_truncates_and_its_calls_are_not_made() -> None:
    """R2.5: finish_reason "length" is truncated."""
    tools = FakeTools()
    completion = _run(ScriptedClient(cut(CALL, 6)), tools)
    assert completion.status is RolloutStatus.TRUNCATED
    assert tools.executed == []


def test_calls_pending_at_the_turn_cap_truncate() -> None:
    """R2.5, R2.6: N tool turns plus a final truncated turn are N + 1 turns, truncated."""
    tools = FakeTools()
    completion = _run(ScriptedClient(*[stop(CALL, EOS)] * 4), tools, max_turns=4)
    assert (len(completion.turns), completion.truncated, completion.done) == (4, True, False)
    assert len(tools.executed) == 3
    assert completion.turns[-1].tool_calls == ()
    assert completion.completion_ids[-2:].tolist() == [CALL, EOS]


def test_a_final_answer_exactly_at_the_cap_is_not_truncated() -> None:
    """R2.6."""
    completion = _run(ScriptedClient(stop(CALL, EOS), stop(6, EOS)), FakeTools(), max_turns=2)
    assert (len(completion.turns), completion.truncated) == (2, False)


def test_the_budget_of_a_turn_is_the_least_of_what_is_left() -> None:
    """R6.4: turn limit 5; budget 10, 4 tokens used -> 6; model length 12, 6 in the context -> 6."""
    cases: list[tuple[dict[str, int], int]] = [
        ({"max_completion_tokens": 10}, 6), ({"max_model_len": 12}, 6), ({"max_turn_tokens": 5}, 5),
    ]  # fmt: skip
    for limits, expected in cases:
        client = ScriptedClient(stop(CALL, EOS), stop(6, EOS))
        _run(client, FakeTools(), **limits)
        assert client.requests[1].max_tokens == expected


def test_a_budget_spent_by_tool_results_truncates_and_keeps_no_dangling_prompt() -> None:
    """R2.5, R3.5: 4 tokens of budget = 2 sampled + 2 of the suffix: nothing could be generated after it."""
    client = ScriptedClient(stop(CALL, EOS))
    completion = _run(client, FakeTools("9"), max_completion_tokens=4)
    assert completion.truncated
    assert len(client.requests) == 1
    assert completion.completion_ids.tolist() == [CALL, EOS]
    assert [message.content for message in completion.completion_messages()][-1] == "9"
    assert len(completion.turns[0].tool_calls) == 1


def test_a_finished_environment_ends_the_rollout_without_a_dangling_suffix() -> None:
    """R3.2, R3.5: done is checked after the tools; done and truncated are separate fields."""
    environment = FakeEnvironment([False, True])
    completion = _run(ScriptedClient(stop(CALL, EOS)), FakeTools("you won"), environment)
    assert (completion.done, completion.status) == (True, RolloutStatus.FINISHED)
    assert completion.completion_ids.tolist() == [CALL, EOS]
    assert [message.content for message in completion.completion_messages()][-1] == "you won"
    assert environment.asked == 2


def test_an_environment_that_is_done_after_its_reset_samples_nothing() -> None:
    """R3.2: checked right after reset."""
    client = ScriptedClient()
    completion = _run(client, FakeTools(), FakeEnvironment([True]))
    assert (completion.done, completion.truncated, completion.turns, client.requests) == (True, False, [], [])


# ---- a conversation that goes on from a checkpoint: from its tokens, never from its text ----


class _ResumingClient(ScriptedClient):
    """Goes on from `partial`, as the real one; `seen` is what there was of the rollout while a turn was generated."""

    def __init__(self, *turns: Answer) -> None:
        super().__init__(*turns)
        self.rollout: Rollout | None = None
        self.seen: list[PartialRollout | None] = []

    async def generate(
        self, request: GenerateRequest, *, partial: Generation | None = None, **given: Any
    ) -> Generation:
        assert partial is not None
        if partial.finish_reason is not None:
            return partial
        rest = await super().generate(request, **given)
        assert rest.token_ids[: len(partial.token_ids)] == partial.token_ids
        partial.token_ids[:], partial.logprobs[:] = rest.token_ids, rest.logprobs
        partial.policy_versions[:] = rest.policy_versions
        partial.top[:] = np.array([[(token, -0.1)] for token in rest.token_ids], TOP).tobytes()
        assert self.rollout is not None
        self.seen.append(self.rollout.snapshot())
        partial.finish_reason = rest.finish_reason
        return partial


TURNS = (stop(5, CALL, EOS), stop(6, 7, EOS))


def _resume(
    client: _ResumingClient, tools: FakeTools | None = None, partial: PartialRollout | None = None
) -> RolloutCompletion:
    client.rollout = _rollout(client, tools)
    assert client.rollout.snapshot() is None
    if partial is not None:
        client.rollout.restore(partial)
    return asyncio.run(client.rollout.run())


def test_a_snapshot_of_each_moment_leads_to_the_same_end() -> None:
    client = _ResumingClient(*TURNS)
    whole = _resume(client, FakeTools())
    first, second = client.seen
    assert first is not None
    assert second is not None
    assert (list(first.turns), list(first.open_ids)) == ([], [5, CALL, EOS])
    assert [list(turn.output_ids) for turn in second.turns] == [[5, CALL, EOS]]
    assert (list(second.open_ids), list(second.open_versions)) == ([6, 7, EOS], [1, 1, 1])
    assert second.open_top is not None
    assert second.open_top["id"].tolist() == [[6], [7], [EOS]]
    for moment in (first, second):
        tools, again = FakeTools(), _ResumingClient(*TURNS)
        resumed = _resume(again, tools, moment)
        assert resumed.completion_ids.tolist() == whole.completion_ids.tolist()
        assert resumed.logprobs.tolist() == whole.logprobs.tolist()
        assert resumed.completion_mask.tolist() == whole.completion_mask.tolist()
        assert [request.seed for request in again.requests] == [r.seed for r in client.requests[-len(again.requests) :]]
        assert len(tools.executed) == 1 - len(moment.turns)  # a call that was answered is not made again


def test_a_turn_that_was_whole_is_not_generated_again_but_its_tools_are_called() -> None:
    partial = PartialRollout(
        rollout_id="r", prompt_ids=[10, 11], open_ids=[5, CALL, EOS], open_logprobs=[-0.1] * 3, open_versions=[0] * 3,
        open_finish=FinishReason.STOP, open_top=np.array([[(n, -0.1)] for n in (5, CALL, EOS)], TOP),
    )  # fmt: skip
    client, tools = _ResumingClient(*TURNS), FakeTools()
    completion = _resume(client, tools, partial)
    assert len(tools.executed) == 1
    assert [request.request_id for request in client.requests] == ["r-t1"]
    assert client.requests[0].token_ids == [10, 11, 5, CALL, EOS, 70, 79]
    assert completion.completion_ids.tolist() == [5, CALL, EOS, 70, 79, 6, 7, EOS]
    assert completion.top is not None
    assert completion.top["id"].tolist() == [[5], [CALL], [EOS], [6], [7], [EOS]]
