"""What the vLLM server does with one request, without vLLM: stamping, flushing; the state of pauses, and the patches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.inference.api import GenerateChunk
from grpo_async.servers.requests import EngineOutput, TokenStream
from grpo_async.servers.vllm.patches import prepare_requests


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20.0))


async def _turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


# ---- the tokens of a request ----


def _chunks(*added: tuple[list[int], list[float], int, str | None], flush_interval_s: float = 60.0) -> Any:
    async def run() -> list[GenerateChunk]:
        stream, chunks = TokenStream(flush_interval_s=flush_interval_s), []
        for token_ids, logprobs, version, finish in added:
            output = EngineOutput(token_ids=token_ids, logprobs=logprobs, finish_reason=finish)
            stream.add(output, version=version)
        while not chunks or (chunks[-1].finish_reason is None and chunks[-1].error is None):
            chunk = await stream.next_chunk()
            chunks.append(chunk)
        return chunks

    return _run(run())


def test_a_chunk_holds_tokens_of_one_version_and_the_last_one_ends() -> None:
    chunks = _chunks(([5], [-0.5], 3, None), ([6], [-0.6], 3, None), ([7], [-0.7], 4, "stop"), ([8], [-0.8], 4, None))
    assert chunks == [
        GenerateChunk(token_ids=[5, 6], logprobs=[-0.5, -0.6], policy_version=3),
        GenerateChunk(token_ids=[7], logprobs=[-0.7], policy_version=4, finish_reason="stop"),
    ]  # and nothing of what came after the end
    assert _chunks(([], [], 2, "abort"), flush_interval_s=0.0) == [
        GenerateChunk(policy_version=2, finish_reason="abort")
    ]


@pytest.mark.parametrize("logprobs", [[-0.5], [-0.5, math.nan]])
def test_missing_and_non_finite_logprobs_end_the_stream_with_an_error(logprobs: list[float]) -> None:
    kept, error = _chunks(([4], [-0.4], 1, None), ([5, 6], logprobs, 1, "length"))
    assert kept == GenerateChunk(token_ids=[4], logprobs=[-0.4], policy_version=1)
    assert (error.token_ids, error.finish_reason) == ([], None)
    assert "2 tokens with the logprobs" in error.error


# ---- patches ----


@pytest.mark.parametrize(("device", "left"), [("cpu", None), ("cuda", 3)])
def test_every_request_carries_the_salt_and_the_adapter_and_a_seed_never_reaches_an_engine_on_a_cpu(
    device: str, left: int | None
) -> None:
    sent: list[Any] = []

    async def send(request: Any) -> None:
        sent.append(
            (request.cache_salt, request.sampling_params and request.sampling_params.seed, request.lora_request)
        )

    engine: Any = SimpleNamespace(
        engine_core=SimpleNamespace(add_request_async=send),
        vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type=device)),
    )
    prepare_requests(engine, lambda: "4", lambda name: f"newest of {name}")
    for name, params, salt in (("a", SimpleNamespace(seed=3), None), ("b", None, "own")):
        request = SimpleNamespace(request_id=name, sampling_params=params, cache_salt=salt)
        asyncio.run(engine.engine_core.add_request_async(request))
    assert sent == [("4/", left, "newest of a"), ("4/own", None, "newest of b")]
