"""Leases: all at once, in order, always given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from grpo_async.envs import EnvironmentCallError, EnvironmentPool
from tests.envs import sample_environments as samples
from tests.envs.helpers import call, pool_of, taken_and_free
from tests.support.waiting import until


def run(factory: str, use: Callable[[EnvironmentPool], Awaitable[Any]], **fields: Any) -> Any:
    async def inside(pool: EnvironmentPool) -> Any:
        return await use(pool)

    with pool_of(factory, **fields) as pool:
        return asyncio.run(inside(pool))


def test_instances_are_made_once_and_used_again_the_probe_first() -> None:
    async def use(pool: EnvironmentPool) -> None:
        assert samples.events.count("made") == 1
        seen: list[set[int]] = []
        for count in (1, 3, 2, 3):
            async with pool.lease(count) as environments:
                assert len(environments) == count
                seen.append({id(environment.instance) for environment in environments})
        assert samples.events.count("made") == 3
        assert seen[0] < seen[1] == seen[3] > seen[2]

    run("Full", use)
    assert samples.events.count("closed") == 3


def test_leases_are_granted_in_order_and_whole_so_that_none_waits_for_ever() -> None:
    async def use(pool: EnvironmentPool) -> None:
        order: list[str] = []
        free = asyncio.Event()

        async def hold(name: str, count: int) -> None:
            async with pool.lease(count):
                order.append(name)
                if name == "first":
                    await free.wait()

        first = asyncio.create_task(hold("first", 2))
        await until(lambda: order == ["first"])
        others = [asyncio.create_task(hold(name, count)) for name, count in (("large", 3), ("small", 1))]
        await asyncio.sleep(0.01)
        assert order == ["first"]  # the small one would fit beside it, but it came later
        free.set()
        await asyncio.wait_for(asyncio.gather(first, *others), 10)
        assert order == ["first", "large", "small"]
        assert taken_and_free(pool) == (0, 3)

    run("Full", use, max_instances=3)


def test_a_lease_that_is_cancelled_in_the_moment_of_its_grant_holds_nothing() -> None:
    """R6.1"""

    async def use(pool: EnvironmentPool) -> None:
        async with pool.lease(2):
            waiting = asyncio.create_task(_reset_one(pool))
            await asyncio.sleep(0.01)
        waiting.cancel()  # nothing ran between the grant and this
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert taken_and_free(pool) == (0, 2)

    run("Full", use, max_instances=2)


@pytest.mark.parametrize("method", ["wait", "wait_async"])
def test_an_instance_whose_call_still_runs_comes_back_when_it_ends(method: str) -> None:
    """R6.1: the cancelled rollout ends at once, the next one cannot meet the call of the last."""

    async def use(pool: EnvironmentPool) -> None:
        async def rollout() -> None:
            async with pool.lease(1) as (environment,):
                await call(environment, method, number=1)

        task = asyncio.create_task(rollout())
        await until(lambda: "begin 1" in samples.events)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1)
        assert taken_and_free(pool) == (1, 0)
        next_lease = asyncio.create_task(_reset_one(pool))
        await asyncio.sleep(0.01)
        assert not next_lease.done()
        samples.gate.set()
        await asyncio.wait_for(next_lease, 10)
        assert samples.events == ["made", "begin 1", "end 1", "reset"]

    run("Gated", use, max_instances=1)


async def _reset_one(pool: EnvironmentPool) -> None:
    async with pool.lease(1) as (environment,):
        await environment.reset({})


@pytest.mark.parametrize("method", ["wait", "wait_async"])
def test_an_instance_that_hung_is_discarded_and_closed_when_it_can_be(method: str) -> None:
    async def use(pool: EnvironmentPool) -> None:
        async with pool.lease(1) as (environment,):
            await call(environment, method)
            hung = environment.instance
        assert taken_and_free(pool) == (0, 0)
        async with pool.lease(1) as (environment,):
            assert environment.instance is not hung
        samples.gate.set()
        await until(lambda: "closed" in samples.events and pool.num_stuck == 0)

    run("Gated", use, timeout_s=0.3, max_instances=1)


def test_a_failed_construction_fails_the_lease_and_keeps_what_there_is() -> None:
    async def use(pool: EnvironmentPool) -> None:
        samples.refuse.set()
        with pytest.raises(EnvironmentCallError, match="making an instance raised ConnectionError: too many sessions"):
            async with pool.lease(2):
                pass
        assert taken_and_free(pool) == (0, 1)

    run("Full", use)
