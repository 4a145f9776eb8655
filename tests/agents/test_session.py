"""Limits, stops, cancellation and refusals of one rollout's calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from grpo_async.agents.calls import AgentRefusal, Call
from grpo_async.agents.session import AgentSession
from grpo_async.errors import ServerUnavailableError
from grpo_async.inference.client import Generation
from grpo_async.records import RolloutStatus
from tests.agents.support import (
    ADD,
    FakePolicy,
    ask,
    call_text,
    check_exact,
    make_session,
    renderer,
    system,
    tool,
    user,
)

Result = TypeVar("Result")


def _policy(*answers: str, **fields: Any) -> FakePolicy:
    said = iter(answers)
    return FakePolicy(renderer(fields.pop("family", "qwen2_5")), lambda _: next(said), **fields)


def _with(policy: FakePolicy, agent: Callable[[AgentSession], Awaitable[Result]], **limits: Any) -> Result:
    async def main() -> Result:
        return await agent(make_session(policy, **limits))

    return asyncio.run(main())


def test_the_budget_of_a_rollout_holds_over_its_calls_and_ends_with_length_then_with_a_refusal() -> None:
    policy = _policy("x" * 50, "y" * 50, odd_tokens=1.0)

    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), max_tokens=12)
        assert (len(first.ids), first.finish_reason, session.is_truncated) == (12, "length", False)  # the call's own
        second = await ask(session, user("q"))
        assert (len(second.ids), second.finish_reason, session.is_truncated) == (8, "length", True)
        empty = await ask(session, user("r"))
        assert (list(empty.ids), empty.content, empty.finish_reason) == ([], "", "length")
        assert session.is_out_of_budget
        with pytest.raises(AgentRefusal, match="max_completion_tokens") as caught:
            await ask(session, user("r"))
        assert (caught.value.status, caught.value.code) == (400, "rollout_budget_exhausted")
        completion = session.completion(RolloutStatus.FINISHED)
        assert (completion.status, completion.truncated) == (RolloutStatus.TRUNCATED, True)
        assert completion.num_sampled_tokens == 20
        check_exact(policy, completion)

    _with(policy, agent, max_completion_tokens=20)


def test_a_context_that_fills_the_model_length_ends_with_length_and_the_rollout_goes_on() -> None:
    policy = _policy("short")

    async def agent(session: AgentSession) -> None:
        empty = await ask(session, user("long " * 40))
        assert (empty.finish_reason, len(empty.ids)) == ("length", 0)
        assert not session.is_out_of_budget
        reply = await ask(session, user("q"))
        assert reply.finish_reason == "stop"
        assert len(reply.prompt_ids) + len(reply.ids) <= 80
        assert session.completion(RolloutStatus.FINISHED).truncated  # a limit of the run has cut it

    _with(policy, agent, max_model_len=80)


def test_the_number_of_calls_and_the_length_of_one_are_limited() -> None:
    policy = _policy("abcdefgh", "b", odd_tokens=1.0)

    async def agent(session: AgentSession) -> None:
        assert len((await ask(session, user("q"))).ids) == 4
        await ask(session, user("q"))
        assert (await ask(session, user("q"))).finish_reason == "length"
        assert session.is_out_of_budget

    _with(policy, agent, max_turns=2, max_turn_tokens=4)


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(per_chunk: int) -> None:
    policy = _policy("I think.\nObservation: made up", "ok", per_chunk=per_chunk, odd_tokens=1.0)
    received: list[int] = []

    async def main() -> None:
        session = make_session(policy, on_tokens=lambda count, _: received.append(count), stop=["Now"])
        reply = await ask(session, user("q"), stop=["Never", "\nObs"])
        assert (reply.content, reply.generation.stop_reason, reply.finish_reason) == ("I think.", "\nObs", "stop")
        await ask(session, user("q"), reply.message, user("Observation: 3"))
        completion = session.completion(RolloutStatus.FINISHED)
        # kept as it was sampled, with the string; the message has what stands before it
        assert policy.chat.completion_text(completion.turns[0].output_ids) == "I think.\nObs"
        assert completion.turns[0].messages[0].content == "I think."
        assert completion.turns[0].stop_reason == "\nObs"
        assert completion.turns[0].tool_response_ids[0] == policy.chat.turn_end_id(())
        check_exact(policy, completion)
        assert not completion.branches
        assert sum(received) == completion.num_sampled_tokens
        assert [served.request.stop for served in policy.served] == [["Now", "Never", "\nObs"], ["Now"]]

    asyncio.run(main())


def test_what_a_cancelled_call_has_sampled_is_trained_nowhere_and_a_whole_answer_is() -> None:
    policy = _policy("half of it", "whole", "second", per_chunk=2, odd_tokens=1.0)
    received: list[int] = []

    async def main() -> None:
        session = make_session(policy, on_tokens=lambda count, _: received.append(count))
        policy.gate = asyncio.Event()
        lost = asyncio.create_task(ask(session, user("q")))
        while not received:
            await asyncio.sleep(0)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        policy.gate.set()
        unread = asyncio.create_task(ask(session, user("q")))
        while not session.completion(RolloutStatus.FINISHED).turns:
            await asyncio.sleep(0)
        unread.cancel()  # too late: its answer is whole
        await ask(session, user("r"))
        completion = session.completion(RolloutStatus.FINISHED)
        check_exact(policy, completion)
        texts = [turn.messages[0].content for turn in completion.all_turns]
        assert sorted(texts) == ["second", "whole"]
        assert sum(received) - completion.num_sampled_tokens == len(policy.served[0].ids)

    asyncio.run(main())


def test_a_closed_session_refuses_and_ends_what_is_under_way() -> None:
    policy = _policy("half of it", per_chunk=2, odd_tokens=1.0)

    async def main() -> None:
        session = make_session(policy)
        policy.gate = asyncio.Event()
        running = asyncio.create_task(ask(session, user("q")))
        while not policy.served:
            await asyncio.sleep(0)
        session.close()
        session.close()
        for call in (running, ask(session, user("q"))):
            with pytest.raises(AgentRefusal) as caught:
                await call
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        assert not session.completion(RolloutStatus.FAILED, error="x").turns

    asyncio.run(main())


def test_servers_that_do_not_answer_are_a_503_and_the_session_knows_why() -> None:
    class Down:
        async def generate(self, *_: Any, **__: Any) -> Generation:
            raise ServerUnavailableError("nobody is there")

    policy = _policy()

    async def main() -> None:
        session = make_session(policy)
        session._sessions.client = Down()  # type: ignore[assignment]
        with pytest.raises(AgentRefusal, match="nobody is there") as caught:
            await ask(session, user("q"))
        assert caught.value.status == 503
        assert session.last_error == "ServerUnavailableError: nobody is there"

    asyncio.run(main())


def test_settings_of_sampling_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy = _policy("a", "b")

    async def agent(session: AgentSession) -> None:
        for _ in range(2):
            sampling = {"temperature": 0.2, "top_p": 1.0}
            await ask(session, user("q"), sampling=sampling, ignored=["presence_penalty"])

    with caplog.at_level(logging.WARNING):
        _with(policy, agent)
    assert [record.args for record in caplog.records] == [("temperature",), ("presence_penalty",)]
    assert {served.request.temperature for served in policy.served} == {1.0}


def test_a_limit_that_cuts_or_refuses_what_is_not_trained_does_not_truncate_the_rollout() -> None:
    async def agent(session: AgentSession) -> None:
        call = Call(messages=[user("q")], response_format={"type": "json_object"})
        assert session.prompt_length(call, is_trained=False) > 0  # a form is refused of what is trained only
        assert (await session.complete(call, "v", is_trained=False)).finish_reason == "length"
        assert not session.is_truncated
        await ask(session, user("q"))
        assert session.is_truncated
        session.is_truncated = False
        with pytest.raises(AgentRefusal, match="has used its"):
            await session.complete(call, "w", is_trained=False)
        assert (session.is_truncated, session.is_out_of_budget) == (False, False)

    _with(_policy("a long verdict", "a long answer", odd_tokens=1.0), agent, max_turn_tokens=4, max_turns=2)


def test_calls_that_are_not_wanted_or_cannot_be_read_stay_in_the_text() -> None:
    broken = '<tool_call>\n{"name": "add", "argu\n</tool_call>'
    halved = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    policy = _policy(call_text(a=1), broken, halved)

    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), tools=[ADD], tool_choice="none")
        assert (len(first.tool_calls), first.content) == (0, call_text(a=1))
        for text in (broken, halved):
            reply = await ask(session, user("q"), tools=[ADD])
            assert (len(reply.tool_calls), reply.content, reply.finish_reason) == (0, text, "stop")
        errors = [path.turns[0].parse_error or "" for path in session.completion(RolloutStatus.FINISHED).paths]
        assert ["cannot be read" in error for error in errors] == [True, False, True]

    _with(policy, agent)


def test_rewards_of_answers_become_those_of_their_branches() -> None:
    policy = _policy("a", "b", "c")

    async def agent(session: AgentSession) -> None:
        first = await ask(session, system("one"), user("q"))
        session.set_reward(0.5)
        second = await ask(session, system("two"), user("q"))
        third = await ask(session, system("two"), user("q"), second.message, user("r"))
        session.set_reward(1.0, f"chatcmpl-{third.id}")
        session.set_reward(0.75, second.id)  # of an earlier answer of the same path
        session.set_reward(0.25, first.id)
        with pytest.raises(AgentRefusal, match="no answer"):
            session.set_reward(1.0, "chatcmpl-other")
        completion = session.completion(RolloutStatus.FINISHED)
        assert completion.environment_rewards == {"agent": 1.0}
        assert [branch.reward for branch in completion.branches] == [0.25]
        assert session.completion(RolloutStatus.FINISHED, reward=3.0).environment_rewards == {"agent": 3.0}

    _with(policy, agent)


def test_ids_that_the_policy_wrote_itself_go_to_the_client_and_back() -> None:
    policy = _policy(family="mistral", odd_tokens=0.0)
    said = iter(['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', "b"])
    policy.say = lambda _: next(said)

    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), tools=[ADD])
        assert [call["id"] for call in first.tool_calls] == ["abcdefghi"]
        await ask(session, user("q"), first.message, tool(first.message["tool_calls"][0], "3"), tools=[ADD])
        check_exact(policy, session.completion(RolloutStatus.FINISHED))

    _with(policy, agent)
