"""Agents that are functions of the user: what they get, what they may return, and how they fail or hang."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.agents.agent import AgentError, AgentResult, read_result
from grpo_async.agents.function import AgentClient, load_function_agent
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError

SESSION: Any = SimpleNamespace(
    base_url="http://127.0.0.1:9/v1",
    anthropic_base_url="http://127.0.0.1:9",
    key="k",
    untrained_key="u",
    model="policy",
)


def plain(row: dict[str, Any], client: AgentClient, scale: float = 1.0) -> dict[str, Any]:
    assert (client.base_url, client.anthropic_base_url, client.api_key, client.untrained_api_key, client.model) == (
        "http://127.0.0.1:9/v1", "http://127.0.0.1:9", "k", "u", "policy",
    )  # fmt: skip
    return {"reward": scale * row["weight"], "client": type(client.openai).__name__, "key": client.openai.api_key}


async def coroutine(row: dict[str, Any], client: AgentClient) -> dict[str, Any]:
    return {"client": type(client.openai).__name__, "key": client.openai.api_key, "retries": client.openai.max_retries}


async def raises(row: dict[str, Any], client: AgentClient) -> None:
    raise KeyError("answer")


async def hangs(row: dict[str, Any], client: AgentClient) -> None:
    await asyncio.sleep(1000)


async def blocks(row: dict[str, Any], client: AgentClient) -> None:
    time.sleep(3.0)  # noqa: ASYNC251 - so it is meant


def _run(name: str, **section: Any) -> AgentResult:
    async def run() -> AgentResult:
        settings = AgentSection(function=f"tests.agents.test_function:{name}", **section)
        agent = load_function_agent(settings, max_concurrent=2)
        try:
            return await agent.run({"prompt": "hi", "weight": 2}, SESSION)
        finally:
            await agent.aclose()

    return asyncio.run(run())


def test_a_function_gets_row_client_and_arguments() -> None:
    result = _run("plain", arguments={"scale": 0.25})
    assert (result.reward, result.columns) == (0.5, {"client": "OpenAI", "key": "k"})
    assert _run("coroutine").columns == {"client": "AsyncOpenAI", "key": "k", "retries": 0}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raises", r"the agent raised KeyError: 'answer' \(.*test_function\.py, line \d+\)"),
        ("hangs", r"the agent took longer than 0\.5 s; raise `rollout\.agent\.timeout_s`"),
        ("blocks", r"blocks its event loop at .*test_function\.py:\d+ in blocks.*; an async function must `await`"),
    ],
)
def test_a_function_that_fails_or_hangs_says_where(name: str, told: str) -> None:
    with pytest.raises(AgentError, match=told):
        _run(name, timeout_s=0.5)


def test_a_function_that_cannot_be_used_is_named_at_the_start() -> None:
    section = AgentSection(function="tests.agents.test_function:plain", arguments={"speed": 1})
    with pytest.raises(ConfigError, match=r"does not take \(row, client, speed=\)"):
        load_function_agent(section, max_concurrent=1)


def test_single_answers_may_have_rewards_of_their_own() -> None:
    result = read_result({"reward": 1, "rewards": {"chatcmpl-1": 0.5, "chatcmpl-2": None}, "note": "x"})
    assert (result.reward, result.rewards, result.columns) == (1.0, {"chatcmpl-1": 0.5}, {"note": "x"})
    for raw in ([1], {"reward": "high"}, {"rewards": {"a": float("nan")}}):
        with pytest.raises(AgentError, match=r"result is (\[1\]|'high'|nan)"):
            read_result(raw)
