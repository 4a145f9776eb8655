"""Groups made by agents, over the real endpoint and a policy without a model: what a rollout becomes, however its agent ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from grpo_async.agents.agent import Agent, AgentResult
from grpo_async.agents.calls import Call
from grpo_async.agents.session import AgentSession
from grpo_async.buffer.group import OpenGroup
from grpo_async.config.sections import AgentSection
from grpo_async.inference.api import GenerateRequest
from grpo_async.records import AGENT_REWARD, Origin, Prompt, RolloutCompletion, RolloutStatus, TaggedMessage
from grpo_async.rollout.agent_producer import AgentHost, AgentProducer
from grpo_async.rollout.group import ErrorLog
from tests.agents.support import FakePolicy, check_exact, renderer, settings, user
from tests.rollout.fakes import open_group

PROMPT = Prompt(
    prompt_id=7,
    messages=[TaggedMessage(role="user", content="1 + 1 =", origin=Origin.PROMPT)],
    columns={"answer": "2", "tags": ["a"]},
)
Run = Callable[[dict[str, Any], AgentSession, int], Awaitable[AgentResult]]


class ScriptedAgent(Agent):
    """Runs `run`, which also gets the number of the rollout in its group."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.sessions: list[AgentSession] = []

    async def run(self, row: Mapping[str, Any], session: AgentSession) -> AgentResult:
        self.sessions.append(session)
        return await self._run(dict(row), session, int(session.rollout_id.rpartition("r")[2]))

    async def aclose(self) -> None:
        self.sessions.clear()


async def _ask(session: AgentSession, text: str = "1 + 1 =") -> str:
    return (await session.complete(Call(messages=[user(text)]), secrets.token_hex(4))).content


def _policy(say: Callable[[GenerateRequest], str] = lambda _: "two") -> FakePolicy:
    return FakePolicy(renderer(), say)


def _produce(
    run: Run,
    *,
    size: int = 2,
    policy: FakePolicy | None = None,
    needs_reward: bool = False,
    group: OpenGroup | None = None,
    section: Mapping[str, Any] | None = None,
    **limits: Any,
) -> tuple[list[RolloutCompletion], ErrorLog]:
    policy = policy or _policy()
    errors = ErrorLog()

    async def produce() -> list[RolloutCompletion]:
        agent = ScriptedAgent(run)
        host = AgentHost(agent, AgentSection(function="a:b", **(section or {})), max_concurrent=2)
        client: Any = policy
        producer = AgentProducer(
            host,
            client,
            policy.chat,
            settings(stop_token_ids=policy.chat.end_of_turn_ids, **limits),
            needs_reward=needs_reward,
            errors=errors,
        )
        made = group or open_group(PROMPT, name="g7", size=size, seed=5)
        try:
            async with asyncio.timeout(30.0), producer.produce(made):
                assert all(session.is_closed for session in agent.sessions)
                return list(made.completions)
        finally:
            await host.aclose()

    return asyncio.run(produce()), errors


def test_a_rollout_has_the_calls_and_the_result_of_its_agent() -> None:
    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        assert row == {"prompt": [{"role": "user", "content": "1 + 1 ="}], "answer": "2", "tags": ["a"]}
        row["tags"].append("b")  # its own copy
        first = await _ask(session)
        await _ask(session, "something else")
        rewards = {"chatcmpl-" + session._history.answers[0].id: 0.25} if number else {}
        return AgentResult(value={"said": first}, reward=float(number), columns={"said": first}, rewards=rewards)

    policy, group = _policy(), open_group(PROMPT, name="g7", seed=5)
    completions, errors = _produce(run, policy=policy, group=group)
    assert [each.rollout_id for each in completions] == ["g7-r0", "g7-r1"]
    for number, each in enumerate(completions):
        assert each.status is RolloutStatus.FINISHED
        assert each.environment_rewards == {AGENT_REWARD: float(number)}
        assert each.reward_columns == {"said": "two", "result": {"said": "two"}}
        assert [message.content for message in each.prompt_messages or ()] == ["something else"]
        assert len(each.branches) == 1  # the first call, which the second did not go on from
        assert group.num_tokens[number] == each.num_sampled_tokens
    assert [each.branches[0].reward for each in completions] == [None, 0.25]
    assert errors.counts == {}
    served = {each.request.request_id: each for each in policy.served}
    assert len(served) == 4
    assert {each.affinity for each in policy.served} == {"g7/0", "g7/1"}
    only_first = FakePolicy(policy.chat, policy.say, served=[e for n, e in served.items() if n.startswith("g7-r0")])
    check_exact(only_first, completions[0])


def test_an_agent_that_fails_fails_its_rollout_alone() -> None:
    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        await _ask(session)
        if number == 0:
            raise KeyError("city")
        return AgentResult(reward=1.0)

    completions, errors = _produce(run, size=3)
    assert [each.status for each in completions] == [
        RolloutStatus.FAILED, RolloutStatus.FINISHED, RolloutStatus.FINISHED,
    ]  # fmt: skip
    assert completions[0].error == "KeyError: 'city'"
    assert completions[0].num_sampled_tokens > 0  # what led to it
    assert errors.counts == {"rollout: KeyError": 1}


def test_an_agent_that_hangs_fails_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async.rollout.agent_producer._TIMEOUT_MARGIN_S", 0.0)

    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        await _ask(session)
        await asyncio.sleep(1000)
        return AgentResult()

    completions, _ = _produce(run, section={"timeout_s": 0.3})
    assert {each.error for each in completions} == {"the agent did not finish within rollout.agent.timeout_s = 0.3 s"}


def test_no_more_agents_run_at_once_than_the_limit() -> None:
    running: list[int] = []
    most = 0

    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        await _ask(session)
        running.remove(number)
        return AgentResult(reward=1.0)

    _produce(run, size=5)
    assert most == 2


def test_an_agent_that_never_calls_the_model_has_failed() -> None:
    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        return AgentResult(reward=1.0)

    completions, _ = _produce(run)
    assert completions[0].status is RolloutStatus.FAILED
    assert "ended without an answered call to the model" in (completions[0].error or "")


def test_without_reward_functions_the_agent_has_to_say_its_reward() -> None:
    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        await _ask(session)
        return AgentResult(value={"tests": 3}, columns={"tests": 3})

    completions, _ = _produce(run, needs_reward=True)
    assert "has no reward, and the run has no other; it is {'tests': 3}" in (completions[0].error or "")
    completions, _ = _produce(run)
    assert completions[0].status is RolloutStatus.FINISHED
    assert completions[0].environment_rewards == {}


def test_an_agent_that_fails_because_its_tokens_are_used_up_is_truncated() -> None:
    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        for _ in range(10):
            await _ask(session)
        return AgentResult(reward=1.0)

    completions, errors = _produce(run, max_turns=3)
    assert {each.status for each in completions} == {RolloutStatus.TRUNCATED}
    assert all(each.truncated and each.num_sampled_tokens > 0 for each in completions)
    assert errors.counts == {"agent out of tokens": 2}


def test_a_resume_goes_on_with_the_rollouts_that_were_over() -> None:
    calls = []

    async def run(row: dict[str, Any], session: AgentSession, number: int) -> AgentResult:
        calls.append(number)
        await _ask(session)
        return AgentResult(reward=1.0)

    group = open_group(PROMPT)
    first, _ = _produce(run, group=group)
    snapshot = group.snapshot()
    assert snapshot.rollouts == {0: first[0], 1: first[1]}
    again = open_group(PROMPT)
    again.restore({1: first[1]}, keeps_open_turns=True)
    second, _ = _produce(run, group=again)
    assert second[1] is first[1]
    assert calls == [0, 1, 0]
