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

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.router import FixedServers
from grpo_async.records import RolloutCompletion
from tests.agents.support import Served, check_exact, renderer
from tests.agents.test_conversations import Conversation
from tests.servers.embedded_support import live, load, teacher_forced
from tests.support.tiny_model import build_tool_model

TEMPERATURE = 0.7
NUM_RANDOM = 12


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
