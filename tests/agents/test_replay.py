"""Agents over the embedded engine: every sampled token of every path has the logprob that one plain forward over its sample gives.

Tolerance, fp32: 2e-5 in the natural log of a token's probability, as for any rollout (tests/rollout/test_replay.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from grpo_async.agents.endpoint import AgentEndpoint
from grpo_async.agents.session import AgentSession
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.router import FixedServers
from grpo_async.records import RolloutCompletion, RolloutStatus
from tests.agents.support import Served, check_exact, renderer, settings
from tests.agents.test_conversations import Conversation
from tests.servers.embedded_support import live, load, teacher_forced
from tests.support.tiny_model import build_tool_model

TEMPERATURE = 0.7
NUM_RANDOM = 12


def test_every_path_of_an_agent_has_the_logprobs_of_a_replay(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    model = load(tiny_model)
    chat = ChatRenderer(AutoTokenizer.from_pretrained(tiny_model))
    with live(model, max_model_len=1024) as server:
        received: list[int] = []
        completion = asyncio.run(_converse(server.url, chat, received))
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


@dataclass
class _Recorded:
    """A client of the engine that keeps what it saw and sampled, as the policy without a model does."""

    client: InferenceClient
    chat: ChatRenderer
    served: list[Served] = field(default_factory=list)

    async def generate(self, request: GenerateRequest, **options: Any) -> Generation:
        served, partial = Served(request, []), Generation()
        self.served.append(served)
        try:
            generation = await self.client.generate(request, partial=partial, **options)
            served.is_whole = True
        finally:
            served.ids = list(partial.token_ids)
        return generation


def test_random_conversations_have_the_logprobs_of_a_replay_on_every_path(tmp_path: Path) -> None:
    """The conversations of test_conversations.py, answered by a model."""
    folder = build_tool_model(tmp_path)
    model, chat = load(folder), renderer("qwen2_5")
    ends = [*chat.end_of_turn_ids, *range(5, len(chat.tokenizer), 7)]  # a random model would hardly ever end its turn

    async def converse(url: str) -> list[tuple[_Recorded, int, RolloutCompletion]]:
        found = []
        async with InferenceClient(
            FixedServers([url]), token=None, request_timeout_s=60.0, wait_timeout_s=60.0
        ) as client:
            for number in range(NUM_RANDOM):
                policy = _Recorded(client, chat)
                conversation = Conversation(
                    chat, "random", random.Random(number), policy=policy, stop_token_ids=ends, temperature=TEMPERATURE,
                    max_model_len=1024, max_turn_tokens=30,
                )  # fmt: skip
                completion = await conversation.run()
                found.append((policy, conversation.received, completion))
        return found

    def replay(context: Sequence[int], output: Sequence[int]) -> list[float]:
        logprobs: list[float] = teacher_forced(model, context, output, TEMPERATURE).tolist()
        return logprobs

    with live(model, max_model_len=1024, model_path=str(folder)) as server:  # it finds stop strings by the tokenizer
        found = asyncio.run(converse(server.url))
    for policy, received, completion in found:
        check_exact(policy, completion, replay, tolerance=2e-5)
        assert received == sum(len(served.ids) for served in policy.served)
    assert sum(len(completion.branches) for _, _, completion in found) > NUM_RANDOM
    assert sum(not served.is_whole for policy, _, _ in found for served in policy.served) > 2  # hang-ups


async def _converse(url: str, chat: ChatRenderer, received: list[int]) -> RolloutCompletion:
    servers = FixedServers([url])
    async with (
        InferenceClient(servers, token=None, request_timeout_s=60.0, wait_timeout_s=60.0) as client,
        AgentEndpoint(client, chat) as endpoint,
    ):
        given = settings(
            temperature=TEMPERATURE, stop_token_ids=chat.end_of_turn_ids, max_model_len=1024, max_turn_tokens=30
        )
        session = AgentSession(
            endpoint.sessions, "g0-r0", settings=given, seed=3, on_tokens=lambda count, _: received.append(count)
        )
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as agent:
            messages: list[Any] = [{"role": "user", "content": "hello world"}]
            for _ in range(3):
                answer = await agent.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "and now?"}]
            again = [agent.chat.completions.create(model="m", messages=messages) for _ in range(2)]
            await asyncio.gather(*again)
            edited = [*messages[:2], {"role": "user", "content": "what is one?"}]
            await agent.chat.completions.create(model="m", messages=edited)
        return session.completion(RolloutStatus.FINISHED)
