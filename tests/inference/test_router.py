"""Which server a request goes to, and what happens to it when that server is fenced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from grpo_async.errors import DeadlineError
from grpo_async.inference.router import Router
from tests.inference.scripted_servers import ScriptedServers, address

Start = Callable[..., Any]


def _router(*names: str, wait_timeout_s: float = 5.0) -> tuple[ScriptedServers, Router]:
    servers = ScriptedServers(*names)
    return servers, Router(servers, wait_timeout_s=wait_timeout_s)


@asynccontextmanager
async def _requests(router: Router) -> AsyncIterator[Start]:
    """A function that starts a request and names its server; all stay in flight until the end of the `with` block."""
    async with AsyncExitStack() as stack:

        async def start(affinity: str = "", *, avoid: int | None = None) -> str:
            return (await stack.enter_async_context(router.lease(affinity, avoid=avoid))).name

        yield start


def _run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20.0))


def test_the_least_loaded_server_is_taken_and_a_failed_one_avoided_as_long_as_there_is_another() -> None:
    async def test() -> None:
        async with _requests(_router("a", "b", "c")[1]) as start:
            assert [await start() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
        async with _requests(_router("a", "b")[1]) as start:
            assert await start("g1/r0") == "a"
            assert await start("g1/r0", avoid=0) == "b"
            assert await start("g1/r0") == "b"  # its context is there now
            assert [await start(avoid=0) for _ in range(3)] == ["b"] * 3  # however loaded it is
        async with _requests(_router("a")[1]) as start:
            assert await start(avoid=0) == "a"

    _run(test)


def test_a_request_waits_for_a_server_and_the_wait_has_a_deadline() -> None:
    async def test() -> None:
        _, router = _router(wait_timeout_s=0.05)
        with pytest.raises(DeadlineError, match=r"inference\.startup_timeout_s"):
            async with router.lease():
                raise AssertionError("there is no server")
        servers, router = _router(wait_timeout_s=10.0)

        async def name() -> str:
            async with router.lease() as server:
                return server.name

        tasks = [asyncio.create_task(name()) for _ in range(3)]
        await asyncio.sleep(0)
        servers.set(address(0, "late"))
        assert await asyncio.gather(*tasks) == ["late"] * 3

    _run(test)
