"""Which recorded tokens a call goes on from, and what becomes a branch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_async.agents.session import AgentSession
from grpo_async.inference.api import GenerateRequest
from grpo_async.records import RolloutCompletion, RolloutStatus
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

S = system("You add.")


def _run(
    agent: Callable[[AgentSession], Any], *answers: str, family: str = "qwen2_5", **fields: Any
) -> tuple[RolloutCompletion, FakePolicy]:
    """The completion after `agent` ran; the n-th request gets the n-th answer. Exactness is checked in any case."""
    said = iter(answers)
    policy = FakePolicy(renderer(family), lambda _: next(said), **fields)

    async def main() -> RolloutCompletion:
        session = make_session(policy)
        await agent(session)
        return session.completion(RolloutStatus.FINISHED)

    completion = asyncio.run(main())
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
        own = {
            "id": "mine",
            "type": "function",
            "function": {"name": "add", "arguments": '{ "b":2,   "a":1 }'},
        }
        assert call["function"]["arguments"] == {"a": 1.0, "b": 2}
        messages += [first.message | {"tool_calls": [own], "content": None or ""}, tool(own, "3")]
        second = await ask(session, *messages, tools=[ADD])
        await ask(session, *messages, second.message, user("Sure?"), tools=[ADD])

    completion, policy = _run(agent, call_text(a=1.0, b=2), "  It is 3.\n", "Yes.")
    assert not completion.branches
    assert [len(turn.output_ids) > 0 for turn in completion.turns] == [True] * 3
    assert _texts(completion.turns) == [
        [("assistant", ""), ("tool", "3")],
        [("assistant", "  It is 3.\n"), ("user", "Sure?")],
        [("assistant", "Yes.")],
    ]
    [call] = completion.turns[0].tool_calls
    assert (call.name, call.arguments, call.result, call.failed) == ("add", {"a": 1.0, "b": 2}, "3", None)
    assert completion.tool_metrics() == {"tools/call_frequency": 1.0}
    seen = [list(served.request.token_ids) for served in policy.served]
    for before, after in zip(policy.served, seen[1:], strict=False):
        whole = [*before.request.token_ids, *before.ids]
        assert after[: len(whole)] == whole
    # the odd tokens: the same text would be others
    assert policy.chat.text_ids(policy.chat.completion_text(completion.turns[1].output_ids)) != list(
        completion.turns[1].output_ids[:-1]
    )


def test_thinking_that_the_client_strips_stays_in_the_tokens() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("1 + 2?"), tools=[ADD])
        assert first.reasoning == "1 and 2"
        call = first.message["tool_calls"][0]
        second = await ask(session, user("1 + 2?"), first.message, tool(call, "3"), tools=[ADD])
        assert (second.reasoning, second.content) == ("so 3", "3")

    completion, _ = _run(
        agent, f"<think>\n1 and 2\n</think>\n\n{call_text(a=1, b=2)}", "<think>so 3</think>3", family="qwen3"
    )
    assert not completion.branches
    assert completion.turns[0].messages[0].content.startswith("<think>")


def test_a_template_that_drops_earlier_thinking_makes_a_root_of_each_question() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("a"))
        await ask(session, user("a"), first.message, user("b"))

    completion, policy = _run(agent, "<think>x</think>one", "<think>y</think>two", family="qwen3")
    assert "x" not in policy.chat.completion_text(completion.prompt_ids).split("user")[-1]
    assert _texts(completion.turns) == [[("assistant", "<think>y</think>two")]]
    assert [(branch.name, branch.parent, _texts(branch.turns)) for branch in completion.branches] == [
        ("b1", 0, [[("assistant", "<think>x</think>one")]])
    ]


def test_retries_parallel_calls_and_edits_are_branches_of_the_recorded_ids() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, S, user("q"))
        begin = [S, user("q"), first.message]
        await ask(session, *begin, user("x"))
        await ask(session, *begin, user("x"))  # a retry
        await asyncio.gather(ask(session, *begin, user("y")), ask(session, *begin, user("z")))
        await ask(session, S, user("q"), first.message | {"content": "edited"}, user("x"))

    completion, _ = _run(agent, "a", "b", "c", "d", "e", "f")
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
    assert completion.num_sampled_tokens == sum(len(turn.output_ids) for turn in completion.all_turns)


def test_compaction_other_tools_and_sub_agents_are_paths_of_their_own() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, S, user("q"), tools=[ADD])
        helper = await ask(session, system("You help."), user("sub"))
        await ask(session, system("You help."), user("sub"), helper.message, user("more"))
        await ask(session, S, user("q"), first.message, user("x"))  # without the tools
        await ask(session, S, user("summary: q was asked"), tools=[ADD])

    completion, _ = _run(agent, "a", "h", "h2", "b", "c")
    paths = [_texts(path.turns) for path in completion.paths]
    assert paths == [
        [[("assistant", "c")]],
        [[("assistant", "a")]],
        [[("assistant", "h"), ("user", "more")], [("assistant", "h2")]],
        [[("assistant", "b")]],
    ]
    # which one its beginning is shared with: the system prompt with the tools, or without
    assert [branch.parent for branch in completion.branches] == [0, 0, 0]


def test_of_equal_answers_each_is_gone_on_from_once_the_newest_first() -> None:
    async def agent(session: AgentSession) -> None:
        for _ in range(2):
            said = (await ask(session, user("q"))).message
        await ask(session, user("q"), said, user("r"))
        await ask(session, user("q"), said, user("s"))

    completion, _ = _run(agent, "a", "a", "b", "c")
    assert [len(path.turns) for path in completion.paths] == [2, 2]


def test_results_come_in_any_order_and_belong_to_their_calls() -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), tools=[ADD])
        one, two = first.message["tool_calls"]
        await ask(session, user("q"), first.message, tool(two, "SECOND"), tool(one, "FIRST"), tools=[ADD])
        # the same texts, of the other calls
        await ask(session, user("q"), first.message, tool(one, "SECOND"), tool(two, "FIRST"), tools=[ADD])
        await ask(session, user("q"), first.message, tool(one, "only one"), tools=[ADD])  # cannot go on: a root

    completion, policy = _run(agent, call_text(a=1) + "\n" + call_text(a=2), "done", "other", "odd")
    seen, other = (policy.chat.completion_text(policy.served[n].request.token_ids) for n in (1, 2))
    assert seen.index("FIRST") < seen.index("SECOND")
    assert other.index("SECOND") < other.index("FIRST")
    assert [len(path.turns) for path in completion.paths] == [1, 2, 1]


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "no_end_token"])
def test_an_answer_that_was_cut_goes_on_behind_the_templates_own_end(family: str) -> None:
    async def agent(session: AgentSession) -> None:
        first = await ask(session, user("q"), max_tokens=3)
        assert first.finish_reason == "length"
        await ask(session, user("q"), first.message, user("go on"))

    completion, policy = _run(agent, "a long answer", "end", family=family)
    if family == "no_end_token":  # nothing closes a turn but text: all of it is rendered
        assert len(completion.branches) == 1
        return
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

    completion, policy = _run(agent, call_text(a=1), "b")
    ids = [*completion.prompt_ids, *completion.completion_ids]
    start, end = (policy.chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    # system, user, assistant, tool, assistant
    assert (ids.count(start), ids.count(end)) == (5, 5)
    assert not completion.branches


def test_calls_with_the_same_arguments_are_told_apart_by_their_ids() -> None:
    results: dict[str, str] = {}

    async def agent(session: AgentSession) -> None:
        one = await ask(session, user("q"), tools=[ADD])
        two = await ask(session, user("q"), tools=[ADD])
        for reply, result in ((one, "A"), (two, "B")):
            written = json.loads(json.dumps(reply.message))
            results[written["tool_calls"][0]["id"]] = result
            await ask(session, user("q"), written, tool(written["tool_calls"][0], result), tools=[ADD])

    completion, _ = _run(agent, call_text(a=1), call_text(a=1), "from one", "from two")
    found = {
        path.turns[0].messages[0].tool_calls[0]["id"]: path.turns[0].messages[1].content for path in completion.paths
    }
    assert found == results
    assert sorted(found.values()) == ["A", "B"]


def test_seeds_differ_between_calls_and_a_clients_seed_is_mixed_in() -> None:
    seeds: list[int] = []

    def say(request: GenerateRequest) -> str:
        seeds.append(request.seed)
        return "x"

    policy = FakePolicy(renderer(), say)

    async def main() -> None:
        session = make_session(policy)
        for _ in range(2):
            await ask(session, user("q"))
            await ask(session, user("q"), seed=42)

    asyncio.run(main())
    assert len(set(seeds)) == 4
