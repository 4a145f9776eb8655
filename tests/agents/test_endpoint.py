"""The endpoint as the real clients of OpenAI and Anthropic see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from grpo_async.agents.apis import ChatCompletion, Exchange, Messages, Responses
from grpo_async.agents.session import AgentSession
from grpo_async.inference.api import GenerateRequest
from grpo_async.records import RolloutCompletion, RolloutStatus
from tests.agents.support import ADD, FakePolicy, calls, check_exact, policy_saying, renderer, serving, user
from tests.support.waiting import until

TOOL = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}  # type: ignore[index]
FLAT = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]

_policy = partial(policy_saying, family="qwen3")


def _openai(session: AgentSession, **fields: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0, **fields)


def _anthropic(session: AgentSession) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=session.anthropic_base_url, api_key=session.key, max_retries=0)


def _run(policy: FakePolicy, agent: Callable[[AgentSession], Any], *, num_branches: int = 0, **limits: Any) -> Any:
    """What `agent` returned; its rollout is exact, and has so many branches."""

    async def main() -> Any:
        async with serving(policy, **limits) as (_, session):
            result = await agent(session)
            completion = session.completion(RolloutStatus.FINISHED)
            check_exact(policy, completion)
            assert len(completion.branches) == num_branches
            return result

    return asyncio.run(main())


THOUGHT = f"<think>\n1 and 2\n</think>\n\nI add.\n{calls('add', a=1, b=2)}\n{calls('add', a=3, b=4)}"
ARGUMENTS = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_completions_with_tools_by_the_real_client(is_stream: bool) -> None:
    policy = _policy(THOUGHT, "It is 3.", per_chunk=3)

    async def complete(client: openai.AsyncOpenAI, **fields: Any) -> Any:
        fields = {"model": "any", "tools": [ADD], **fields}
        if not is_stream:
            return await client.chat.completions.create(**fields)
        async with client.chat.completions.stream(stream_options={"include_usage": True}, **fields) as stream:
            kinds = [event.type async for event in stream]
            assert "content.delta" in kinds
            return await stream.get_final_completion()

    async def agent(session: AgentSession) -> None:
        async with _openai(session) as client:
            messages: list[Any] = [user("1 + 2?")]
            first = await complete(client, messages=messages)
            choice = first.choices[0]
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
            assert choice.message.reasoning_content == "1 and 2"
            made = choice.message.tool_calls
            assert [json.loads(call.function.arguments) for call in made] == ARGUMENTS
            messages += [choice.message, *({"role": "tool", "tool_call_id": call.id, "content": "3"} for call in made)]
            second = await complete(client, messages=messages)
            assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It is 3.")
            assert second.usage.prompt_tokens > first.usage.total_tokens

    _run(policy, agent)


@pytest.mark.parametrize("is_stream", [False, True])
def test_messages_with_tools_by_the_real_client(is_stream: bool) -> None:
    policy = _policy(
        THOUGHT, "<think>so 3</think>It is 3.", "one two THE END", "x" * 90, calls("add", a=1), per_chunk=3
    )

    async def complete(client: anthropic.AsyncAnthropic, **fields: Any) -> Any:
        fields = {"model": "any", "max_tokens": 300, "system": "You add.", "tools": [TOOL], **fields}
        if not is_stream:
            return await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            return await stream.get_final_message()

    async def agent(session: AgentSession) -> None:
        async with _anthropic(session) as client:
            messages: list[Any] = [user("1 + 2?")]
            count = await client.messages.count_tokens(model="any", messages=messages, tools=[TOOL], system="You add.")
            first = await complete(client, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024})
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert (first.content[0].thinking, first.content[1].text) == ("1 and 2", "I add.")
            assert ([block.input for block in first.content[2:]], first.stop_reason) == (ARGUMENTS, "tool_use")
            assert is_stream or first.usage.input_tokens == count.input_tokens
            text = [{"type": "text", "text": "3"}]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": text} for use in first.content[2:]]
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
            second = await complete(client, messages=messages)
            assert [block.type for block in second.content] == ["text"]  # thinking was not asked for
            assert (second.content[0].text, second.stop_reason) == ("It is 3.", "end_turn")
            third = await complete(client, messages=[user("q")], tools=[], stop_sequences=["THE"])
            assert (third.content[0].text, third.stop_sequence) == ("one two ", "THE")
            fourth = await complete(client, messages=[user("q")], tools=[], max_tokens=5)
            assert fourth.stop_reason == "max_tokens"
            fifth = await complete(client, messages=[user("q")], stop_sequences=["</tool_call>"])
            assert ([block.type for block in fifth.content], fifth.stop_reason) == (["tool_use"], "tool_use")
            assert fifth.stop_sequence is None

    _run(policy, agent, num_branches=3)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("keeps_state", [False, True])
def test_responses_with_tools_by_the_real_client(is_stream: bool, keeps_state: bool) -> None:
    policy = _policy(THOUGHT, "It is 3.", per_chunk=3)

    async def complete(client: openai.AsyncOpenAI, **fields: Any) -> Any:
        fields = {"model": "any", "tools": [FLAT], "instructions": "You add.", **fields}
        if not is_stream:
            return await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            return await stream.get_final_response()

    async def agent(session: AgentSession) -> None:
        async with _openai(session) as client:
            items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            first = await complete(client, input=items)
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
            assert (first.status, first.output_text) == ("completed", "I add.")
            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in first.output[2:]
            ]
            if keeps_state:
                second = await complete(client, input=results, previous_response_id=first.id)
            else:
                output = [item.model_dump(exclude_none=True) for item in first.output]
                second = await complete(client, input=[*items, *output, *results])
            assert (second.output_text, second.usage.input_tokens > first.usage.input_tokens) == ("It is 3.", True)

    _run(policy, agent)
    assert "system\nYou add." in policy.chat.completion_text(policy.served[0].request.token_ids)


def test_what_is_called_with_the_second_key_is_answered_and_trained_nowhere() -> None:
    policy = _policy("an answer", "a verdict", "another", per_chunk=2)

    async def main() -> RolloutCompletion:
        async with serving(policy) as (_, session):
            async with _openai(session) as client:
                asking: dict[str, Any] = {"model": "m", "messages": [user("q")], "temperature": 0.25, "seed": 3}
                await client.chat.completions.create(**asking)
                judge = client.with_options(api_key=session.untrained_key)
                verdict = await judge.chat.completions.create(**asking)
                assert verdict.choices[0].message.content == "a verdict"
                async for _ in await judge.chat.completions.create(**asking, stream=True):
                    pass
                session.close()
                with pytest.raises(openai.AuthenticationError):
                    await judge.chat.completions.create(**asking)
            return session.completion(RolloutStatus.FINISHED)

    completion = asyncio.run(main())
    assert [message.content for message in completion.completion_messages()] == ["an answer"]
    assert not completion.branches
    assert completion.num_sampled_tokens == len(policy.served[0].ids)
    # what is trained is sampled with the settings of the run
    assert [served.request.temperature for served in policy.served] == [1.0, 0.25, 0.25]
    assert [served.request.seed == 3 for served in policy.served] == [False, True, True]


def test_a_key_is_of_one_rollout_until_it_ends() -> None:
    policy = _policy("a")

    async def main() -> None:
        async with serving(policy) as (endpoint, session):
            async with _openai(session) as client:
                assert [model.id async for model in client.models.list()] == ["tiny"]
                session.close()
                with pytest.raises(openai.AuthenticationError, match="no rollout that is running") as caught:
                    await client.chat.completions.create(model="m", messages=[user("q")])
                assert caught.value.code == "invalid_api_key"
            async with _anthropic(session) as other:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "q"}])
                assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index, call-overload]
            assert endpoint.sessions.by_key == {}

    asyncio.run(main())


CHAT: dict[str, Any] = {"messages": [user("q")]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
LISTED_ID = {"role": "assistant", "tool_calls": [{"id": ["1"], "type": "function", "function": {"name": "add"}}]}
TOOL_RESULT = {"role": "tool", "tool_call_id": "1", "content": "3"}
NAMED = {"type": "function", "function": {"name": "add"}}
TWO_CALLS = {"role": "assistant", "tool_calls": [{"id": "1", **NAMED}, {"id": "2", **NAMED}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("chat/completions", b"{", 400, None),
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages[0].content"),
        ("chat/completions", {"messages": [LISTED_ID, TOOL_RESULT]}, 400, "messages[0].tool_calls"),
        ("chat/completions", CHAT | {"tools": [{"type": "web_search"}]}, 400, "tools[0]"),
        ("chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
        ("chat/completions", {"messages": [user("q"), {"role": "assistant", "content": "It is"}]}, 400, "messages"),
        ("chat/completions", {"messages": [user("q"), TWO_CALLS, TOOL_RESULT]}, 400, "messages"),
        ("chat/completions", {"messages": [user("q"), TOOL_RESULT]}, 400, "messages"),  # of no call
        ("chat/completions", CHAT | {"n": 2}, 400, "n"),
        ("chat/completions", CHAT | {"logprobs": True}, 400, "logprobs"),
        ("completions", {"prompt": "a"}, 404, None),
        ("responses", {"input": [{"type": "image_generation_call"}]}, 400, "input[0]"),
        ("responses", {"input": "q", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ],
)
def test_what_is_not_supported_is_refused_in_openais_format(
    path: str, body: Any, status: int, param: str | None
) -> None:
    async def agent(session: AgentSession) -> None:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.key}"}, trust_env=False) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post(f"{session.base_url}/{path}", content=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (status, "invalid_request_error", param), error
        assert error["message"]

    _run(_policy(), agent)


def test_what_is_not_supported_is_refused_in_anthropics_format() -> None:
    async def agent(session: AgentSession) -> None:
        async with _anthropic(session) as client:
            body: Any = {"model": "m", "max_tokens": 9, "messages": [user("q")], "extra_body": {"thread": {"id": "x"}}}
            with pytest.raises(anthropic.BadRequestError, match="thread_unsupported_request") as caught:
                await client.messages.create(**body)
            assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]

    _run(_policy(), agent)


class City(BaseModel):
    name: str
    size: int


ROME = '{"name": "Rome", "size": 3}'
ASKED: dict[str, Any] = {"model": "m", "messages": [user("q")]}


async def _chat_parse(client: openai.AsyncOpenAI) -> Any:
    return (await client.chat.completions.parse(**ASKED, response_format=City)).choices[0].message.parsed


async def _responses_parse(client: openai.AsyncOpenAI) -> Any:
    return (await client.responses.parse(model="m", input="q", text_format=City)).output_parsed


async def _messages_parse(client: anthropic.AsyncAnthropic) -> Any:
    return (await client.messages.parse(**ASKED, max_tokens=99, output_format=City)).parsed_output


@pytest.mark.parametrize("ask", [_chat_parse, _responses_parse, _messages_parse])
def test_formats_by_the_real_clients_are_constraints_of_the_request(ask: Any) -> None:
    policy = _policy(ROME)

    async def agent(session: AgentSession) -> Any:
        async with (_anthropic if ask is _messages_parse else _openai)(session) as client:
            return await ask(client)

    assert _run(policy, agent) == City(name="Rome", size=3)
    assert "size" in str(policy.served[0].request.structured_outputs)


@pytest.mark.parametrize(
    ("api", "tool", "choice"),
    [
        (ChatCompletion, ADD, NAMED),
        (Responses, FLAT, {"type": "function", "name": "add"}),
        (Messages, TOOL, {"type": "any"}),
    ],
)
def test_sampling_settings_and_a_forced_call_are_read_by_every_api(api: type[Exchange], tool: Any, choice: Any) -> None:
    asked = {"input": "q"} if api is Responses else {"messages": [user("q")]}
    asked |= {"temperature": 0.25, "top_k": -1, "seed": 3, "tools": [tool], "tool_choice": choice}
    call = api(asked, "m", {}).call
    assert (call.tool_choice, [each["function"]["name"] for each in call.forced_tools]) == ("required", ["add"])
    assert (call.sampling, call.seed) == ({"temperature": 0.25, "top_k": 0}, 3)


@pytest.mark.parametrize("constraint", [{"response_format": {"type": "json_object"}}, {"tool_choice": "required"}])
@pytest.mark.parametrize("corrects", [False, True])
def test_a_constrained_answer_is_trained_only_where_the_loss_corrects_for_the_constraint(
    corrects: bool, constraint: dict[str, Any]
) -> None:
    policy = policy_saying("free", ROME, "free again", per_chunk=2)

    async def main() -> RolloutCompletion:
        async with serving(policy, corrects_sampling=corrects) as (_, session):
            async with _openai(session) as client:
                messages: list[Any] = [user("q")]
                for more in ({}, constraint, {}):
                    asked: Any = {"model": "m", "messages": messages, "tools": [ADD], **more}
                    answer = (await client.chat.completions.create(**asked)).choices[0].message
                    messages += [{"role": "assistant", "content": answer.content}, user("and?")]
            return session.completion(RolloutStatus.FINISHED)

    completion = asyncio.run(main())
    assert not completion.branches  # the tokens of all answers are context of what follows
    lengths = [len(served.ids) for served in policy.served]
    assert completion.num_sampled_tokens == sum(lengths)
    assert completion.completion_mask.sum() == (sum(lengths) if corrects else lengths[0] + lengths[2])


def test_a_client_that_hangs_up_cancels_its_call() -> None:
    policy = _policy("half of it", "whole", per_chunk=1, odd_tokens=1.0)

    async def agent(session: AgentSession) -> None:
        policy.gate = asyncio.Event()
        headers = {"authorization": f"Bearer {session.key}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            asking = asyncio.create_task(client.post(f"{session.base_url}/chat/completions", json=CHAT))
            await until(lambda: bool(policy.served and policy.served[0].ids))
            asking.cancel()
        # the client's session is closed, and its connection with it
        await until(lambda: not session._running)
        policy.gate.set()
        async with _openai(session) as other:
            await other.chat.completions.create(model="m", messages=[user("q")])

    _run(policy, agent)
    assert not policy.served[0].is_whole


def test_a_request_that_is_too_large_is_not_read_and_a_fault_of_our_own_is_told_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_async.agents.endpoint._MAX_REQUEST_BYTES", 4096)

    def fail(_: GenerateRequest) -> str:
        raise ZeroDivisionError

    async def agent(session: AgentSession) -> None:
        async with _openai(session) as client:
            with pytest.raises(openai.APIStatusError, match="more than 4096 bytes") as caught:
                await client.chat.completions.create(model="m", messages=[user("x" * 9000)])
            assert caught.value.status_code == 413
            with pytest.raises(openai.InternalServerError, match="the run's log has the traceback"):
                await client.chat.completions.create(model="m", messages=[user("q")])

    _run(FakePolicy(renderer(), fail), agent)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_a_client_goes_on_after_all_tasks_of_the_loop_were_cancelled() -> None:
    """As before the last evaluation of a run: connections that wait for their next request are closed, not left waiting."""

    async def agent(session: AgentSession) -> str | None:
        client = _openai(session, timeout=20.0)
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Go."}])
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=20.0)
        return answer.choices[0].message.content

    assert _run(_policy("one", "two"), agent, num_branches=1) == "two"


def test_a_connection_that_a_client_keeps_does_not_hold_up_the_end() -> None:
    async def main() -> None:
        async with httpx.AsyncClient() as client, asyncio.timeout(30.0) as limit, serving(_policy()) as (_, session):
            await client.get(f"{session.base_url}/models", headers={"authorization": f"Bearer {session.key}"})
            limit.reschedule(asyncio.get_running_loop().time() + 4.0)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_what_ends_an_answer_is_said_in_the_words_of_each_api() -> None:
    long = "one two THE END" + "x" * 80
    policy = _policy(*[long] * 3, odd_tokens=1.0)

    async def agent(session: AgentSession) -> None:
        async with _openai(session) as client:
            chat = await client.chat.completions.create(model="m", messages=[user("q")], stop="THE")
            assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("one two ", "stop")
            assert chat.choices[0].model_dump()["stop_reason"] == "THE"
            chat = await client.chat.completions.create(model="m", messages=[user("q")], max_completion_tokens=5)
            assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (5, "length")  # type: ignore[union-attr]
            response = await client.responses.create(model="m", input="q", max_output_tokens=5)
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]

    _run(policy, agent, num_branches=2)


@pytest.mark.parametrize(
    ("api", "body", "ignored"),
    [
        (ChatCompletion, {"parallel_tool_calls": True, "chat_template_kwargs": {}, "stop_token_ids": None}, []),
        (ChatCompletion, {"parallel_tool_calls": False, "n": 1}, ["parallel_tool_calls"]),
        (Responses, {"input": "q", "reasoning": {"effort": "low"}}, ["reasoning.effort"]),
    ],
)
def test_settings_that_change_the_answer_and_have_no_effect_are_known_as_ignored(
    api: type[Exchange], body: dict[str, Any], ignored: list[str]
) -> None:
    assert api({"messages": [user("q")], **body}, "m", {}).call.ignored == ignored
