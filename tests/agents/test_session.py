"""One rollout's calls: limits, stops, cancellation and refusals; which recorded tokens a call continues, what a branch is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest

from grpo_async.agents.calls import ApiError, Call
from grpo_async.agents.session import AgentSession
from grpo_async.records import RolloutCompletion, RolloutStatus
from tests.agents.support import (
    ADD,
    FakePolicy,
    ask,
    calls,
    check_exact,
    make_session,
    policy_saying,
    system,
    text_ids,
    tool,
    user,
)

Result = TypeVar("Result")


def _with(policy: FakePolicy, agent: Callable[[AgentSession], Awaitable[Result]], **limits: Any) -> Result:
    async def main() -> Result:
        return await agent(make_session(policy, **limits))

    return asyncio.run(main())


def test_the_budget_of_a_rollout_holds_over_its_calls_and_ends_with_length_then_with_a_refusal() -> None:
    policy = policy_saying("x" * 50, "y" * 50, odd_tokens=1.0)

    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), max_tokens=12)
        assert (len(first.ids), first.finish_reason, session.is_truncated) == (12, "length", False)  # the call's own
        second = await ask(session, user("q"))
        assert (len(second.ids), second.finish_reason, session.is_truncated) == (8, "length", True)
        empty = await ask(session, user("r"))
        assert (list(empty.ids), empty.content, empty.finish_reason) == ([], "", "length")
        assert session.is_out_of_budget
        with pytest.raises(ApiError, match="max_completion_tokens") as caught:
            await ask(session, user("r"))
        assert (caught.value.status, caught.value.code) == (400, "rollout_budget_exhausted")
        completion = session.completion(RolloutStatus.FINISHED)
        assert (completion.status, completion.truncated) == (RolloutStatus.TRUNCATED, True)
        assert completion.num_sampled_tokens == 20
        check_exact(policy, completion)

    _with(policy, agent, max_completion_tokens=20)


def test_a_context_that_fills_the_model_length_ends_with_length_and_the_rollout_goes_on() -> None:
    async def agent(session: AgentSession) -> None:
        empty = await ask(session, user("long " * 40))
        assert (empty.finish_reason, len(empty.ids), session.is_out_of_budget) == ("length", 0, False)
        assert (await ask(session, user("q"))).finish_reason == "stop"
        assert session.completion(RolloutStatus.FINISHED).truncated  # a limit of the run has cut it

    _with(policy_saying("short"), agent, max_model_len=80)


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it() -> None:
    policy = policy_saying("I think.\nObservation: made up", "ok", per_chunk=3, odd_tokens=1.0)

    async def main() -> None:
        session = make_session(policy, stop=["Now"])
        reply = await ask(session, user("q"), stop=["Never", "\nObs"])
        assert (reply.content, reply.generation.stop_reason, reply.finish_reason) == ("I think.", "\nObs", "stop")
        await ask(session, user("q"), reply.message, user("Observation: 3"))
        completion = session.completion(RolloutStatus.FINISHED)
        # the tokens are kept as sampled, with the string; the message has the text before it
        assert policy.chat.completion_text(completion.turns[0].output_ids) == "I think.\nObs"
        assert completion.turns[0].messages[0].content == "I think."
        assert completion.turns[0].tool_response_ids[0] == policy.chat.turn_end_id(())
        check_exact(policy, completion)
        assert not completion.branches
        assert [served.request.stop for served in policy.served] == [["Now", "Never", "\nObs"], ["Now"]]

    asyncio.run(main())


def test_what_a_cancelled_call_has_sampled_is_trained_nowhere() -> None:
    policy = policy_saying("half of it", "whole", per_chunk=2, odd_tokens=1.0)
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
        await ask(session, user("q"))
        completion = session.completion(RolloutStatus.FINISHED)
        check_exact(policy, completion)
        assert [turn.messages[0].content for turn in completion.all_turns] == ["whole"]
        assert sum(received) - completion.num_sampled_tokens == len(policy.served[0].ids)

    asyncio.run(main())


def test_a_closed_session_refuses_and_ends_what_is_under_way() -> None:
    policy = policy_saying("half of it", per_chunk=2, odd_tokens=1.0)

    async def main() -> None:
        session = make_session(policy)
        policy.gate = asyncio.Event()
        running = asyncio.create_task(ask(session, user("q")))
        while not policy.served:
            await asyncio.sleep(0)
        session.close()
        for call in (running, ask(session, user("q"))):
            with pytest.raises(ApiError) as caught:
                await call
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        assert not session.completion(RolloutStatus.FAILED, error="x").turns

    asyncio.run(main())


def test_a_limit_that_cuts_or_refuses_what_is_not_trained_does_not_truncate_the_rollout() -> None:
    async def agent(session: AgentSession) -> None:
        call = Call(messages=[user("q")], response_format={"type": "json_object"})
        assert await session.prompt_length(call, is_trained=False) > 0
        assert (await session.complete(call, "v", is_trained=False)).finish_reason == "length"
        assert not session.is_truncated
        await ask(session, user("q"))
        assert session.is_truncated
        session.is_truncated = False
        with pytest.raises(ApiError, match="has used its"):
            await session.complete(call, "w", is_trained=False)
        assert (session.is_truncated, session.is_out_of_budget) == (False, False)

    _with(policy_saying("a long verdict", "a long answer", odd_tokens=1.0), agent, max_turn_tokens=4, max_turns=2)


def test_rewards_of_answers_become_those_of_their_branches() -> None:
    policy = policy_saying("a", "b", "c")

    async def agent(session: AgentSession) -> None:
        first = await ask(session, system("one"), user("q"))
        session.set_reward(first.id, 0.5)
        second = await ask(session, system("two"), user("q"))
        third = await ask(session, system("two"), user("q"), second.message, user("r"))
        session.set_reward(f"chatcmpl-{third.id}", 1.0)
        session.set_reward(second.id, 0.75)  # of an earlier answer of the same path
        session.set_reward(first.id, 0.25)
        with pytest.raises(LookupError, match="no answer"):
            session.set_reward("chatcmpl-other", 1.0)
        completion = session.completion(RolloutStatus.FINISHED)
        assert completion.environment_rewards == {"agent": 1.0}
        assert [branch.reward for branch in completion.branches] == [0.25]
        assert session.completion(RolloutStatus.FINISHED, reward=3.0).environment_rewards == {"agent": 3.0}

    _with(policy, agent)


# -- the tree of calls

S = system("You add.")


def _run(agent: Callable[[AgentSession], Any], *answers: str, **fields: Any) -> tuple[RolloutCompletion, FakePolicy]:
    """The completion after `agent` ran; the n-th request gets the n-th answer. Exactness is checked in any case."""
    policy = policy_saying(*answers, **fields)

    async def play(session: AgentSession) -> RolloutCompletion:
        await agent(session)
        return session.completion(RolloutStatus.FINISHED)

    completion = _with(policy, play)
    check_exact(policy, completion)
    return completion, policy


def _texts(turns: Sequence[Any]) -> list[list[tuple[str, str]]]:
    return [[(message.role, message.content) for message in turn.messages] for turn in turns]


def test_a_history_that_only_grows_is_one_path_with_the_recorded_ids() -> None:
    async def agent(session: AgentSession) -> None:
        messages = [S, user("1 + 2?")]
        first = await ask(session, *messages, tools=[ADD])
        # a client writes the arguments in its own way, has its own ids, and strips blanks
        call = first.message["tool_calls"][0]
        assert call["function"]["arguments"] == {"a": 1.0, "b": 2}
        own = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{ "b":2,   "a":1 }'}}
        messages += [first.message | {"tool_calls": [own]}, tool(own, "3")]
        second = await ask(session, *messages, tools=[ADD])
        await ask(session, *messages, second.message, user("Sure?"), tools=[ADD])

    completion, policy = _run(agent, calls("add", a=1.0, b=2), "  It is 3.\n", "Yes.")
    assert not completion.branches
    assert _texts(completion.turns) == [
        [("assistant", ""), ("tool", "3")],
        [("assistant", "  It is 3.\n"), ("user", "Sure?")],
        [("assistant", "Yes.")],
    ]
    [call] = completion.turns[0].tool_calls
    assert (call.name, call.arguments, call.result, call.failed) == ("add", {"a": 1.0, "b": 2}, "3", None)
    assert list(completion.tool_names) == ["add"]
    # the odd tokens: the same text would be others
    assert text_ids(policy.chat, policy.chat.completion_text(completion.turns[1].output_ids)) != list(
        completion.turns[1].output_ids[:-1]
    )


def test_retries_parallel_calls_and_edits_are_branches_of_the_recorded_ids() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, S, user("q"))
        begin = [S, user("q"), first.message]
        await ask(session, *begin, user("x"))
        await ask(session, *begin, user("x"))  # a retry
        await asyncio.gather(ask(session, *begin, user("y")), ask(session, *begin, user("z")))
        await ask(session, *begin, user("x"), tools=[ADD])  # other tools: another context
        await ask(session, S, user("q"), first.message | {"content": "edited"}, user("x"))

    completion, _ = _run(agent, *"abcdegf")
    # the newest answer is that of the edited history, a root; then the tree of the first
    assert _texts(completion.turns) == [[("assistant", "f")]]
    names = {branch.name: branch for branch in completion.branches}
    assert _texts(names["b1"].turns) == [[("assistant", "a"), ("user", "x")], [("assistant", "b")]]
    for name in ("b2", "b3", "b4"):
        branch = names[name]
        assert branch.parent == 1
        first = names["b1"].turns[0]
        shared = [*names["b1"].prompt_ids, *first.output_ids]
        assert list(branch.prompt_ids[: len(shared)]) == shared
        assert [message.content for message in branch.prompt_messages[:3]] == ["You add.", "q", "a"]
    assert [_texts(names[name].turns) for name in ("b2", "b3", "b4")] == [
        [[("assistant", text)]] for text in ("c", "d", "e")
    ]
    assert _texts(names["b5"].turns) == [[("assistant", "g")]]
    assert names["b5"].parent == 0


def test_of_equal_answers_each_is_continued_by_what_has_the_ids_of_its_calls() -> None:
    async def agent(session: AgentSession) -> None:
        said = [(await ask(session, user("q"), tools=[ADD])).message for _ in range(2)]
        results.update({message["tool_calls"][0]["id"]: text for message, text in zip(said, "AB", strict=True)})
        for message, text in zip(said, "AB", strict=True):
            await ask(session, user("q"), message, tool(message["tool_calls"][0], text), tools=[ADD])

    results: dict[str, str] = {}
    completion, _ = _run(agent, calls("add", a=1), calls("add", a=1), "from one", "from two")
    turns = [path.turns[0].messages for path in completion.paths]
    assert {said.tool_calls[0]["id"]: result.content for said, result in turns} == results


def test_of_equal_texts_each_is_continued_once() -> None:
    async def agent(session: AgentSession) -> None:
        for _ in range(2):
            said = (await ask(session, user("q"))).message
        for text in "rs":
            await ask(session, user("q"), said, user(text))

    completion, _ = _run(agent, *"aabc")
    assert [len(path.turns) for path in completion.paths] == [2, 2]


def test_results_come_in_any_order_and_belong_to_their_calls() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), tools=[ADD])
        one, two = first.message["tool_calls"]
        await ask(session, user("q"), first.message, tool(two, "SECOND"), tool(one, "FIRST"), tools=[ADD])
        # the same texts, of the other calls
        await ask(session, user("q"), first.message, tool(one, "SECOND"), tool(two, "FIRST"), tools=[ADD])
        await ask(session, user("q"), first.message, tool(one, "only one"), tools=[ADD])  # cannot go on: a root

    completion, policy = _run(agent, calls("add", a=1) + "\n" + calls("add", a=2), "done", "other", "odd")
    seen, other = (policy.chat.completion_text(policy.served[n].request.token_ids) for n in (1, 2))
    assert seen.index("FIRST") < seen.index("SECOND")
    assert other.index("SECOND") < other.index("FIRST")
    assert [len(path.turns) for path in completion.paths] == [1, 2, 1]


@pytest.mark.parametrize("family", ["qwen2_5", "llama3"])
def test_an_answer_that_was_cut_goes_on_behind_the_templates_own_end(family: str) -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), max_tokens=3)
        assert first.finish_reason == "length"
        await ask(session, user("q"), first.message, user("go on"))

    completion, policy = _run(agent, "a long answer", "end", family=family)
    assert not completion.branches
    end = policy.chat.turn_end_id(())
    assert completion.turns[0].tool_response_ids[0] == end
    assert end not in completion.turns[0].output_ids


def test_texts_of_control_tokens_from_a_tool_or_user_stay_text() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q <|im_end|>"), tools=[ADD])
        await ask(
            session,
            user("q <|im_end|>"),
            first.message,
            tool(first.message["tool_calls"][0], "<|im_start|>"),
            tools=[ADD],
        )

    completion, policy = _run(agent, calls("add", a=1), "b")
    ids = [*completion.prompt_ids, *completion.completion_ids]
    start, end = (policy.chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    # system, user, assistant, tool, assistant
    assert (ids.count(start), ids.count(end)) == (5, 5)
    assert not completion.branches


def test_seeds_differ_between_calls_and_a_clients_seed_is_mixed_in() -> None:
    async def agent(session: AgentSession) -> None:
        for seed in (None, 42, None, 42):
            await ask(session, user("q"), seed=seed)

    _, policy = _run(agent, *"abcd")
    assert len({served.request.seed for served in policy.served}) == 4


def test_settings_of_sampling_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy = policy_saying("a", "b")

    async def agent(session: AgentSession) -> None:
        for _ in range(2):
            sampling = {"temperature": 0.2, "top_p": 1.0}
            await ask(session, user("q"), sampling=sampling, ignored=["presence_penalty"])

    with caplog.at_level(logging.WARNING):
        _with(policy, agent)
    assert [record.args for record in caplog.records] == [("temperature",), ("presence_penalty",)]
    assert {served.request.temperature for served in policy.served} == {1.0}


def test_calls_that_are_not_wanted_or_cannot_be_read_stay_in_the_text() -> None:
    broken = '<tool_call>\n{"name": "add", "argu\n</tool_call>'
    halved = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    policy = policy_saying(calls("add", a=1), broken, halved)

    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), tools=[ADD], tool_choice="none")
        assert (len(first.tool_calls), first.content) == (0, calls("add", a=1))
        for text in (broken, halved):
            reply = await ask(session, user("q"), tools=[ADD])
            assert (len(reply.tool_calls), reply.content, reply.finish_reason) == (0, text, "stop")
        errors = [path.turns[0].parse_error or "" for path in session.completion(RolloutStatus.FINISHED).paths]
        assert ["cannot be read" in error for error in errors] == [True, False, True]

    _with(policy, agent)


def test_ids_that_the_policy_wrote_itself_go_to_the_client_and_back() -> None:
    policy = policy_saying(family="mistral", odd_tokens=0.0)
    said = iter(['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', "b"])
    policy.say = lambda _: next(said)

    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), tools=[ADD])
        assert [call["id"] for call in first.tool_calls] == ["abcdefghi"]
        await ask(session, user("q"), first.message, tool(first.message["tool_calls"][0], "3"), tools=[ADD])
        check_exact(policy, session.completion(RolloutStatus.FINISHED))

    _with(policy, agent)
