"""The client with several servers over real connections: what breaks on one goes on on another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.router import ServingServers
from grpo_async.inference.surface import GenerateRequest
from grpo_async.records import FinishReason
from grpo_async.utils.retry import RetryPolicy
from tests.inference.fake_server import FakeServer, fake_server
from tests.inference.scripted_servers import ScriptedServers, endpoint
from tests.support.local_server import Request, line


def _client(servers: ServingServers, *, max_retries: int = 3, wait_timeout_s: float = 20.0) -> InferenceClient:
    return InferenceClient(
        servers,
        token=None,
        request_timeout_s=20.0,
        wait_timeout_s=wait_timeout_s,
        retry=RetryPolicy(max_retries=max_retries, base_s=0.001, rng=random.Random(0)),
    )


def _request(name: str = "r", max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=[1, 2], max_tokens=max_tokens, temperature=1.0)


def _run(work: Coroutine[Any, Any, Generation]) -> Generation:
    async def limited() -> Generation:
        async with asyncio.timeout(20.0):
            return await work

    return asyncio.run(limited())


async def _counting(request: Request, *, version: int, hold: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """One token after the other, each the number of tokens before it; after two of them, `hold` is waited for."""
    first = len(request["token_ids"])
    for number in range(first, first + request["max_tokens"]):
        if hold is not None and number == first + 2:
            await hold.wait()
        yield line([number], version=version, finish="length" if number == first + request["max_tokens"] - 1 else None)


def _holding(version: int) -> Any:
    """Sends two tokens, then nothing more."""
    return lambda request: _counting(request, version=version, hold=asyncio.Event())


def _generous(version: int) -> Any:
    return lambda request: _counting(request, version=version)


def test_a_request_whose_server_is_fenced_goes_on_elsewhere_with_the_tokens_it_has() -> None:
    """Although the connection to it is still open: it hangs. No attempt is used up, as there is none."""

    async def test(hung: FakeServer, other: FakeServer) -> Generation:
        servers = ScriptedServers(hung.url, other.url)

        def fence(_: int, __: int) -> None:
            if len(seen) == 2:
                servers.set(servers.members[1])

        seen: list[int] = []
        async with _client(servers, max_retries=0) as client:
            return await client.generate(
                _request(), on_tokens=lambda count, version: (seen.append(count), fence(count, version))[0]
            )

    with fake_server(script=_holding(3)) as hung, fake_server(script=_generous(4)) as other:
        generation = _run(test(hung, other))
        hung.wait_for(lambda: hung.num_connections == 0, "the connections to a fenced server to be closed")
    assert generation.token_ids == [2, 3, 4, 5, 6, 7, 8, 9]
    assert generation.policy_versions == [3, 3, 4, 4, 4, 4, 4, 4]
    assert generation.logprobs == [-0.5] * 8
    assert generation.finish_reason is FinishReason.LENGTH
    (continuation,) = other.asked("/rollout/generate")
    assert continuation["token_ids"] == [1, 2, 2, 3]
    assert continuation["max_tokens"] == 6


def test_a_server_that_dies_is_reported_and_its_requests_go_to_another() -> None:
    async def test(dying: FakeServer, other: FakeServer) -> Generation:
        servers = ScriptedServers(dying.url, other.url)
        async with _client(servers) as client, asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.generate(_request()))
            await asyncio.to_thread(dying.wait_for, lambda: bool(dying.asked("/rollout/generate")), "the request")
            await asyncio.to_thread(dying.stop)
        assert servers.suspected == [0]
        return task.result()

    with fake_server(script=_holding(3)) as dying, fake_server(script=_generous(3)) as other:
        assert _run(test(dying, other)).token_ids == [2, 3, 4, 5, 6, 7, 8, 9]
        assert len(other.asked("/rollout/generate")) == 1


def test_with_no_server_left_a_request_waits_without_using_up_its_retries() -> None:
    async def test(server: FakeServer) -> Generation:
        servers = ScriptedServers(server.url)
        servers.on_suspect = lambda _: servers.set()  # the fleet looks at it, and it is dead
        async with _client(servers, max_retries=1) as client, asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.generate(_request()))
            for life in ("second", "third", "fourth"):
                asked = len(server.asked("/rollout/generate"))
                await asyncio.to_thread(
                    server.wait_for, lambda asked=asked: len(server.asked("/rollout/generate")) > asked, "the request"
                )
                await asyncio.to_thread(server.stop)
                while servers.members:
                    await asyncio.sleep(0.001)
                server.instance_id = life
                if life == "fourth":
                    server.script = _generous(4)
                await asyncio.to_thread(server.start)
                servers.set(endpoint(0, server.url, life))
        return task.result()

    with fake_server(script=_holding(3)) as server:
        generation = _run(test(server))
    assert generation.token_ids == list(range(2, 10))
    assert generation.policy_versions[-1] == 4


def test_every_request_names_the_life_of_the_server_that_it_is_meant_for() -> None:
    """A server that was restarted has other weights: it refuses, is reported, and the request waits for it to be fit again."""

    async def test(server: FakeServer) -> Generation:
        servers = ScriptedServers(server.url)
        servers.on_suspect = lambda _: servers.set(endpoint(0, server.url, "second"))  # seen, and pushed the weights
        async with _client(servers, max_retries=1) as client:
            first = await client.generate(_request())
            server.instance_id = "second"
            assert (await client.generate(_request())).token_ids == first.token_ids
            assert servers.suspected == [0]
            return first

    with fake_server() as server:
        assert _run(test(server)).token_ids == [7, 8]
        assert [body["instance_id"] for body in server.asked("/rollout/generate")] == ["first", "first", "second"]


def test_many_requests_of_a_server_that_is_fenced_over_and_over_lose_and_repeat_nothing() -> None:
    """Fences at random moments, between any two bytes; each server comes back in another life."""

    async def pour(request: Request) -> AsyncIterator[bytes]:
        first = len(request["token_ids"])
        for number in range(first, first + request["max_tokens"]):
            if number % 4 == 0:
                await asyncio.sleep(0.001)  # so that requests are in flight for a while
            is_last = number == first + request["max_tokens"] - 1
            yield line([number], version=number, finish="length" if is_last else None)

    async def test(urls: list[str]) -> None:
        rng = random.Random(1)
        servers = ScriptedServers(*urls)
        all_members = servers.members
        enough = asyncio.Event()
        num_tokens = 0

        def count(number: int, _: int) -> None:
            nonlocal num_tokens
            num_tokens += number
            if num_tokens % 100 == 0:
                enough.set()

        async def fence_now_and_then() -> None:
            while True:
                await enough.wait()
                enough.clear()
                await asyncio.sleep(rng.random() * 0.002)
                servers.set(*rng.sample(all_members, k=rng.choice([1, 1, 2])))

        async with _client(servers, max_retries=0) as client, asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            fences = tasks.create_task(fence_now_and_then())
            work = [
                tasks.create_task(
                    client.generate(_request(f"r{n}", 100), on_tokens=count, affinity=f"g{n // 8}/{n % 8}")
                )
                for n in range(48)
            ]
            for generation in await asyncio.gather(*work):
                assert generation.token_ids == list(range(2, 102))
                assert generation.policy_versions == generation.token_ids
                assert generation.finish_reason is FinishReason.LENGTH
            fences.cancel()
        assert num_tokens == 48 * 100
        assert all(not route.requests for route in client._router._routes.values())

    with fake_server(script=pour) as a, fake_server(script=pour) as b:
        asyncio.run(test([a.url, b.url]))
        for server in (a, b):
            server.wait_for(lambda server=server: server.num_connections == 0, "all connections to be closed")
            assert len(server.asked("/rollout/generate")) > 20
