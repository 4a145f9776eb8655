"""Run inside the stand-in for vLLM of test_versions: how often the first token of a continuation equals the one before it.

The engine samples as vLLM does on a GPU: a request with a seed has a torch.Generator of its own, made when the request arrives,
any other draws from the server's stream; a token is argmax(p / q) with q ~ Exp(1). (vllm/v1/worker/gpu_model_runner.py,
vllm/v1/sample/ops/topk_topp_sampler.py)

Prints the shares as JSON: of requests that are aborted, whose connection breaks, and that a resumed run goes on with.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import torch

from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.connections import BrokenConnectionError
from grpo_async.inference.router import FixedServers
from grpo_async.inference.surface import GenerateChunk, GenerateRequest
from grpo_async.rollout.producer import seed_of
from grpo_async.servers.vllm import compat
from grpo_async.utils.retry import RetryPolicy

VOCABULARY, NUM_REQUESTS = 5, 600


class _Engine:
    async def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        generator = None
        if getattr(params, "seed", None) is not None:
            generator = torch.Generator().manual_seed(params.seed)
        noise = torch.empty(VOCABULARY).exponential_(generator=generator)
        token = int((torch.full((VOCABULARY,), 1 / VOCABULARY) / noise).argmax())
        output: Any = compat.RequestOutput()
        logprob = SimpleNamespace(logprob=-1.609)
        output.outputs = [SimpleNamespace(token_ids=[token], logprobs=[{token: logprob}], finish_reason=None)]
        return SimpleNamespace(output=output, request_id=request_id)


class _Server:
    """One token for each request, after which the answer is cut off."""

    def __init__(self, how: str) -> None:
        self._how, self._engine = how, _Engine()
        self.status = 200

    @asynccontextmanager
    async def post(self, body: bytes) -> AsyncIterator[_Server]:
        self._outputs: list[Any] = []
        await compat.submit(self._engine, GenerateRequest.model_validate_json(body), self._outputs.append)
        yield self

    async def lines(self) -> AsyncIterator[bytes]:
        for output in self._outputs:
            end = "abort" if self._how == "abort" else None
            chunk = GenerateChunk(token_ids=output.token_ids, logprobs=output.logprobs, finish_reason=end)
            yield chunk.model_dump_json().encode()
        raise BrokenConnectionError("connection reset")

    async def read(self) -> bytes:
        return b""

    async def aclose(self) -> None: ...


async def share_of_repeats(how: str) -> float:
    """Of NUM_REQUESTS with two tokens, the second from a continuation."""
    server, repeats = _Server(how), 0
    retry = RetryPolicy(max_retries=3, base_s=0.0, rng=random.Random(0))
    client = InferenceClient(
        FixedServers(["http://server"]),
        token=None,
        request_timeout_s=60.0,
        wait_timeout_s=5.0,
        retry=retry,
        connect=lambda _: server,
    )
    async with client:
        for number in range(NUM_REQUESTS):
            request = GenerateRequest(
                request_id=str(number), token_ids=[1], max_tokens=2, temperature=1.0, seed=seed_of("request", number)
            )
            partial = None
            if how == "resume":  # the trainer ended after one token, and another goes on
                first = await client.generate(request.model_copy(update={"max_tokens": 1}))
                partial = Generation(token_ids=first.token_ids, logprobs=first.logprobs, policy_versions=[0])
            generation = await client.generate(request, partial=partial)
            first_token, second_token = generation.token_ids
            repeats += first_token == second_token
    return repeats / NUM_REQUESTS


if __name__ == "__main__":
    compat.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    compat.RequestOutputKind = SimpleNamespace(DELTA=None)  # type: ignore[attr-defined]
    compat.tokens_input = lambda ids: ids  # type: ignore[attr-defined]
    torch.manual_seed(0)
    print(json.dumps({how: asyncio.run(share_of_repeats(how)) for how in ("abort", "break", "resume")}))
