"""Leases: all at once, in order, always given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from grpo_async.envs import EnvironmentCallError, EnvironmentPool
from grpo_async.envs import pool as pool_module
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


def test_an_instance_whose_reset_raised_is_discarded() -> None:
    async def use(pool: EnvironmentPool) -> None:
        samples.faults.add("reset")
        with pytest.raises(EnvironmentCallError, match="`reset` raised RuntimeError: no server"):
            await _reset_one(pool)
        samples.faults.clear()
        assert taken_and_free(pool)[1] == 0
        await _reset_one(pool)
        assert taken_and_free(pool)[1] == 1
        await until(lambda: samples.events.count("closed") == 1)
        assert samples.events.count("made") == 2

    run("Full", use)


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("OnlyOnce", "environment `only`: making an instance raised ConnectionError: too many sessions"),
        ("changing", "environment `only`: its factory made a Changed, after a Changing"),
    ],
)
def test_a_failed_construction_fails_the_lease_and_keeps_what_there_is(factory: str, problem: str) -> None:
    async def use(pool: EnvironmentPool) -> None:
        with pytest.raises(EnvironmentCallError, match=problem):
            async with pool.lease(2):
                pass
        assert taken_and_free(pool) == (0, 1)

    run(factory, use)


def test_a_slow_construction_ends_at_its_limit_and_what_it_makes_is_closed() -> None:
    async def use(pool: EnvironmentPool) -> None:
        samples.gate.clear()
        with pytest.raises(
            EnvironmentCallError, match=r"making an instance took longer than 0\.5 s; raise `environments\.only"
        ):
            async with pool.lease(2):
                pass
        assert (*taken_and_free(pool), pool.num_stuck) == (0, 1, 1)
        samples.gate.set()
        await until(lambda: samples.events == ["closed"] and pool.num_stuck == 0)

    samples.gate.set()  # for the probe
    run("Slow", use, timeout_s=0.5)


def test_instances_that_were_made_before_their_lease_was_cancelled_are_not_lost() -> None:
    """R6.1"""

    async def use(pool: EnvironmentPool) -> None:
        task = asyncio.create_task(_reset_all(pool, 4))
        await until(lambda: samples.events.count("made") == 4 and samples.entered.is_set())
        await _settle()  # the loop hears of the three that are there
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert taken_and_free(pool) == (0, 3)
        assert samples.events == ["made"] * 4
        samples.gate.set()
        await until(lambda: samples.events[4:] == ["closed 4"])  # the slow one, once it is there
        async with pool.lease(3) as environments:
            assert sorted(environment.instance.number for environment in environments) == [1, 2, 3]

    run("SlowFromTheFourth", use, max_instances=4)
    assert sorted(samples.events[4:]) == ["closed 1", "closed 2", "closed 3", "closed 4"]


async def _reset_all(pool: EnvironmentPool, count: int) -> None:
    async with pool.lease(count) as environments:
        for environment in environments:
            await environment.reset({})


async def _settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0.002)


def test_an_environment_that_keeps_hanging_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_STUCK", 2)

    async def use(pool: EnvironmentPool) -> None:
        for _ in range(2):
            async with pool.lease(1) as (environment,):
                await call(environment, "wait")
        with pytest.raises(EnvironmentCallError, match="2 of its instances hang in calls past their time limit"):
            async with pool.lease(1):
                pass

    run("Gated", use, timeout_s=0.3)
