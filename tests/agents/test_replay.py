"""Agents over the embedded engine: every sampled token of every path has the logprob that one plain forward over its sample gives.

Tolerance, fp32: 2e-5 in the natural log of a token's probability, as for any rollout (tests/rollout/test_replay.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai

from grpo_async.agents.endpoint import AgentEndpoint
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.router import FixedServers
from grpo_async.records import RolloutCompletion, RolloutStatus
from tests.agents.support import settings
from tests.servers.embedded_support import live, load, teacher_forced

TEMPERATURE = 0.7


def test_every_path_of_an_agent_has_the_logprobs_of_a_replay(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    model = load(tiny_model)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny_model))
    with live(model, max_model_len=1024) as server:
        received: list[int] = []
        completion = asyncio.run(_converse(server.url, renderer, received))
    assert len(completion.paths) >= 3  # the retry, and the edit
    assert sum(received) == completion.num_sampled_tokens > 100
    for path in completion.paths:
        ids = [int(token) for token in path.prompt_ids]
        for turn in path.turns:
            output = [int(token) for token in turn.output_ids]
            expected = teacher_forced(model, ids, output, TEMPERATURE).tolist()
            worst = max(abs(a - float(b)) for a, b in zip(expected, turn.output_logprobs, strict=True))
            assert worst < 2e-5
            ids += [*output, *map(int, turn.tool_response_ids)]


async def _converse(url: str, renderer: ChatRenderer, received: list[int]) -> RolloutCompletion:
    servers = FixedServers([url])
    async with (
        InferenceClient(servers, token=None, request_timeout_s=60.0, wait_timeout_s=60.0) as client,
        AgentEndpoint(client, renderer) as endpoint,
    ):
        given = settings(
            temperature=TEMPERATURE, stop_token_ids=renderer.end_of_turn_ids, max_model_len=1024, max_turn_tokens=30
        )
        session = endpoint.open("g0-r0", settings=given, seed=3, on_tokens=lambda count, _: received.append(count))
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as agent:
            messages: list[Any] = [{"role": "user", "content": "hello world"}]
            for _ in range(3):
                chat = await agent.chat.completions.create(model="m", messages=messages)
                messages += [chat.choices[0].message, {"role": "user", "content": "and now?"}]
            again = [agent.chat.completions.create(model="m", messages=messages) for _ in range(2)]
            await asyncio.gather(*again)
            edited = [*messages[:2], {"role": "user", "content": "what is one?"}]
            await agent.chat.completions.create(model="m", messages=edited)
        return session.completion(RolloutStatus.FINISHED)
