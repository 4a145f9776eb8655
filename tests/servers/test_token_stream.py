"""The tokens of one request on their way to the client."""

from __future__ import annotations

import asyncio
import math

from grpo_async.inference.api import GenerateChunk
from grpo_async.servers.requests import EngineOutput, TokenStream


def _chunks(*added: tuple[int, float, int, str | None]) -> list[GenerateChunk]:
    """The first two of a stream with these tokens: id, logprob, version, finish reason."""

    async def run() -> list[GenerateChunk]:
        stream = TokenStream(flush_interval_s=60.0)
        for token, logprob, version, finish in added:
            stream.add(EngineOutput(token_ids=[token], logprobs=[logprob], finish_reason=finish), version=version)
        return [await stream.next_chunk() for _ in range(2)]

    return asyncio.run(asyncio.wait_for(run(), 20.0))


def test_a_chunk_holds_tokens_of_one_version_and_nothing_follows_the_end_or_a_token_without_a_logprob() -> None:
    first = (5, -0.5, 3, None), (6, -0.6, 3, None)
    whole, end = _chunks(*first, (7, -0.7, 4, "stop"), (8, -0.8, 4, None))
    assert whole == GenerateChunk(token_ids=[5, 6], logprobs=[-0.5, -0.6], policy_version=3)
    assert end == GenerateChunk(token_ids=[7], logprobs=[-0.7], policy_version=4, finish_reason="stop")
    kept, error = _chunks(*first, (7, math.nan, 3, "stop"))
    assert (kept, error.token_ids, error.finish_reason) == (whole, [], None)
    assert "1 tokens with the logprobs" in str(error.error)
