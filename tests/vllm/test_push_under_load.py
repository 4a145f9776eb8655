"""The run's own push and client against the real vLLM with 64 requests in flight: none is lost, and every token is exact."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.control import ServerControl
from grpo_async.inference.router import FixedServers
from grpo_async.inference.surface import GenerateRequest
from grpo_async.training.parameters import ShardedParameters
from grpo_async.weights.push import PushMode, PushReport, PushSettings, push_weights
from grpo_async.weights.transport import WeightTransport
from tests.vllm.reference import TOLERANCE, Reference, largest_difference
from tests.vllm.server import VllmServer, experiment, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

NUM_REQUESTS = 64
NUM_TOKENS = 384  # so long that the push falls into them on any machine
LIMIT_S = 120.0


def _prompt(number: int) -> list[int]:
    return [5 + number, 6, 7, *range(20, 60 + number)]


def _request(number: int, **fields: float) -> GenerateRequest:
    settings = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": number, "flush_interval_s": 0.02} | fields
    return GenerateRequest(request_id=f"g{number}", token_ids=_prompt(number), ignore_eos=True, **settings)


async def _generate_all(server: VllmServer, begun: threading.Event) -> list[Generation]:
    """All requests at once; `begun` when each of them has tokens."""
    waiting = set(range(NUM_REQUESTS))

    async def one(client: InferenceClient, number: int) -> Generation:
        def on_tokens(count: int, version: int) -> None:
            waiting.discard(number)
            if not waiting:
                begun.set()

        return await client.generate(_request(number), on_tokens=on_tokens)

    client = InferenceClient(
        FixedServers([server.url]), token=server.token, request_timeout_s=LIMIT_S,
        wait_timeout_s=LIMIT_S,
    )  # fmt: skip
    async with client:
        return await asyncio.gather(*(one(client, number) for number in range(NUM_REQUESTS)))


def _push(server: VllmServer, model: Reference, version: int, mode: PushMode) -> PushReport:
    control = ServerControl(server.url, token=server.token, timeout_s=LIMIT_S)
    control.info()
    transport = WeightTransport(
        "gloo", host="127.0.0.1", bucket_bytes=1 << 20, timeout_s=LIMIT_S, device=torch.device("cpu")
    )
    try:
        transport.connect([control])
        return push_weights(
            ShardedParameters(model.module, wire_dtype=torch.float32),
            version=version,
            targets=[control],
            transport=transport,
            settings=PushSettings(mode=mode, timeout_s=LIMIT_S, drain_timeout_s=LIMIT_S),
        )
    finally:
        transport.close()
        control.close()


@pytest.mark.parametrize("mode", ["recompute", "abort"])
def test_a_push_during_64_requests_loses_none_and_every_token_is_of_its_version(
    tiny_model: Path, tmp_path: Path, needs_vllm: None, model_a: Reference, model_b: Reference, mode: PushMode
) -> None:
    with running_server(experiment(str(tiny_model)), tmp_path) as server:
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: asyncio.run(_generate_all(server, begun)))
            assert begun.wait(LIMIT_S), "not all requests began"
            report = _push(server, model_b, 1, mode)
            generations = running.result(LIMIT_S)
        assert report.num_bytes == sum(tensor.nbytes for tensor in model_b.parameters().values())
        in_both = 0
        for number, generation in enumerate(generations):
            assert len(generation.token_ids) == NUM_TOKENS
            assert generation.finish_reason == "length"
            assert generation.policy_versions == sorted(generation.policy_versions)
            in_both += set(generation.policy_versions) == {0, 1}
            expected = [
                model.logprobs(_prompt(number), generation.token_ids, temperature=1.0) for model in (model_a, model_b)
            ]
            right = [expected[version][place] for place, version in enumerate(generation.policy_versions)]
            assert largest_difference(generation.logprobs, right) < TOLERANCE, number
        assert in_both > NUM_REQUESTS // 2, "the push came too early or too late to test anything"

        after = server.generate(_prompt(3), temperature=0.0, max_tokens=32)
        assert after.token_ids == model_b.greedy(_prompt(3), after.token_ids)
        expected = model_b.logprobs(_prompt(3), after.token_ids, temperature=1.0)
        assert largest_difference(after.logprobs, expected) < TOLERANCE
