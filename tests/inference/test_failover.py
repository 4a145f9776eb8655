"""A request that moves to another server has the very tokens of an undisturbed one. Servers that are killed: tests/e2e."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.router import FixedServers, Servers
from tests.inference.scripted_servers import ScriptedServers, address
from tests.servers.embedded_support import live, load

NUM_REQUESTS, NUM_TOKENS = 16, 200


async def _generate(servers: Servers, *, disturb: ScriptedServers | None = None) -> list[Generation]:
    """All requests at once; the members of `disturb` change after every 300 tokens."""
    num_tokens = 0
    members = list(disturb.members) if disturb else []

    def count(number: int, _: int) -> None:
        nonlocal num_tokens
        before, num_tokens = num_tokens, num_tokens + number
        if disturb is not None and before // 300 != num_tokens // 300:
            survivor = members[num_tokens // 300 % 2]
            disturb.set(address(survivor.index, survivor.url, ""))

    async with InferenceClient(servers, token=None, request_timeout_s=60.0, wait_timeout_s=60.0) as client:
        requests = [
            GenerateRequest(
                request_id=f"r{number}", token_ids=[(7 * number + i * i) % 300 for i in range(20)], temperature=1.0,
                max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, flush_interval_s=0.02,
            )
            for number in range(NUM_REQUESTS)
        ]  # fmt: skip
        async with asyncio.timeout(300.0):
            work = [
                client.generate(request, on_tokens=count, affinity=f"g{number // 4}/{number % 4}")
                for number, request in enumerate(requests)
            ]
            found = await asyncio.gather(*work)
    assert num_tokens == NUM_REQUESTS * NUM_TOKENS
    return found


def test_requests_whose_servers_are_fenced_over_and_over_lose_no_token_and_double_none(tiny_model: Path) -> None:
    with live(load(tiny_model)) as first, live(load(tiny_model)) as second:
        servers = ScriptedServers(first.url, second.url)
        servers.members = [address(member.index, member.url, "") for member in servers.members]
        expected = asyncio.run(_generate(FixedServers([first.url])))
        found = asyncio.run(_generate(servers, disturb=servers))
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) == len(one.logprobs) == len(one.policy_versions) == NUM_TOKENS
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert set(one.policy_versions) == {0}
        assert one.finish_reason is other.finish_reason
    assert sum(len(one.waits) > 1 for one in found) > 4, "no request has moved"
