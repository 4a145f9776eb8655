"""Which server a request goes to, and what becomes of it when that is taken out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from grpo_async.errors import DeadlineError
from grpo_async.inference import router as router_module
from grpo_async.inference.router import FencedError, Route, Router
from tests.inference.scripted_servers import ScriptedServers, endpoint


class _Requests:
    """Requests in flight, held open until the end."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.stack = AsyncExitStack()

    async def begin(self, affinity: str = "", *, avoid: int | None = None) -> str:
        return (await self.stack.enter_async_context(self.router.lease(affinity, avoid=avoid))).server.name


@asynccontextmanager
async def _requests(router: Router) -> AsyncIterator[_Requests]:
    requests = _Requests(router)
    async with requests.stack:
        yield requests


def _run(test: Callable[[], Any]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20.0):
            await test()

    asyncio.run(limited())


def test_the_least_loaded_server_is_taken() -> None:
    async def test() -> None:
        async with _requests(Router(ScriptedServers("a", "b", "c"), wait_timeout_s=5.0)) as requests:
            assert [await requests.begin() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]

    _run(test)


def test_the_group_of_the_worked_example() -> None:
    """As the module's docstring says it."""

    async def test() -> None:
        router = Router(ScriptedServers("A", "B"), wait_timeout_s=5.0)
        async with _requests(router) as requests:
            taken = [await requests.begin(f"g12/r{number}") for number in range(12)]
            assert taken == ["A"] * 9 + ["B", "A", "B"]
        async with _requests(router) as requests:  # second turns
            assert await requests.begin("g12/r0") == "A"
            assert await requests.begin("g12/r9") == "B"
            assert await requests.begin("g12/r11") == "B"
            assert await requests.begin("g12/r15") == "A"  # a rollout that begins late goes to the group's server

    _run(test)


def test_a_failed_server_is_avoided_as_long_as_there_is_another() -> None:
    async def test() -> None:
        async with _requests(Router(ScriptedServers("a", "b"), wait_timeout_s=5.0)) as requests:
            assert await requests.begin("g1/r0") == "a"
            assert await requests.begin("g1/r0", avoid=0) == "b"
            assert await requests.begin("g1/r0") == "b"  # its context is there now
        async with _requests(Router(ScriptedServers("a", "b"), wait_timeout_s=5.0)) as requests:
            assert [await requests.begin(avoid=0) for _ in range(3)] == ["b"] * 3  # however loaded it is
        async with _requests(Router(ScriptedServers("a"), wait_timeout_s=5.0)) as requests:
            assert await requests.begin(avoid=0) == "a"

    _run(test)


def test_the_requests_of_a_fenced_server_end_at_once_and_others_go_on() -> None:
    async def test() -> None:
        servers = ScriptedServers("a", "b")
        unused: list[Route] = []
        router = Router(servers, wait_timeout_s=5.0, on_unused=unused.append)
        taken = asyncio.Queue[str]()

        async def request(release: asyncio.Event) -> str:
            async with router.lease() as route:
                taken.put_nowait(route.server.name)
                await release.wait()
            return route.server.name

        release = asyncio.Event()
        tasks = [asyncio.create_task(request(release)) for _ in range(4)]
        assert [await taken.get() for _ in tasks] == ["a", "b", "a", "b"]
        a, b = servers.members
        servers.set(b)
        with pytest.raises(FencedError):
            await tasks[0]
        with pytest.raises(FencedError):
            await tasks[2]
        assert [route.server for route in unused] == [a]  # told once, after its last request
        assert not tasks[1].done()
        release.set()
        assert [await tasks[1], await tasks[3]] == ["b", "b"]
        async with router.lease() as route:
            assert route.server is b

    _run(test)


def test_another_life_of_a_server_is_another_server() -> None:
    async def test() -> None:
        servers = ScriptedServers("a")
        router = Router(servers, wait_timeout_s=5.0)

        async def restart() -> None:
            async with router.lease("g1"):
                servers.set(endpoint(0, "a", life="second"))
                await asyncio.Event().wait()

        with pytest.raises(FencedError):
            await restart()
        async with router.lease("g1") as route:
            assert route.server.instance_id == "second"

    _run(test)


def test_a_request_waits_for_a_server_and_the_wait_has_a_deadline() -> None:
    async def test() -> None:
        servers = ScriptedServers()
        router = Router(servers, wait_timeout_s=0.05)
        with pytest.raises(DeadlineError, match=r"inference\.startup_timeout_s"):
            async with router.lease():
                raise AssertionError("there is no server")
        router = Router(servers, wait_timeout_s=10.0)

        async def name() -> str:
            async with router.lease() as route:
                return route.server.name

        tasks = [asyncio.create_task(name()) for _ in range(3)]
        await asyncio.sleep(0)
        servers.set(endpoint(0, "late"))
        assert await asyncio.gather(*tasks) == ["late"] * 3

    _run(test)


def test_a_server_that_is_back_before_its_last_request_has_ended_is_told_of_once_and_is_new() -> None:
    """Its connections must not be closed under the requests that it has got since."""

    async def test() -> None:
        servers = ScriptedServers("a")
        unused: list[Route] = []
        router = Router(servers, wait_timeout_s=5.0, on_unused=unused.append)
        ended = asyncio.Event()

        async def slow_to_end() -> None:
            async with router.lease():
                try:
                    await asyncio.Event().wait()
                finally:
                    await ended.wait()

        task = asyncio.create_task(slow_to_end())
        await asyncio.sleep(0)
        old = router._routes[0, "first"]
        members = servers.members
        servers.set()
        await asyncio.sleep(0)
        servers.set(*members)
        async with router.lease() as route:
            ended.set()
            with pytest.raises(FencedError):
                await task
            assert unused == [old]
            assert route is not old

    _run(test)


def test_affinities_are_forgotten_when_they_were_not_used_for_long_or_their_server_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a long run is bounded."""
    monkeypatch.setattr(router_module, "_MOST_HOMES", 10)

    async def test() -> None:
        servers = ScriptedServers("a", "b")
        router = Router(servers, wait_timeout_s=5.0)
        for number in range(50):
            async with router.lease(f"g{number}/r0"), router.lease("kept/r0"):
                pass
        assert len(router._homes) == 10
        async with _requests(router) as requests:
            await requests.begin()  # a is loaded
            assert await requests.begin("kept/r0") == "b"
            assert await requests.begin("g1/r0") == "a"  # forgotten: the least loaded one
        servers.set(servers.members[0])
        await asyncio.sleep(0)
        assert "kept/r0" not in router._homes

    _run(test)
