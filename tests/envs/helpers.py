"""Builders that the tests of environments share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_async.config.sections import EnvironmentSection
from grpo_async.envs import Environment, EnvironmentPool, Environments, load_environments
from grpo_async.records import ToolCall, ToolCallRecord
from grpo_async.tools import ToolExecutor

SAMPLES = "tests.envs.sample_environments"


def section(factory: str, **fields: Any) -> EnvironmentSection:
    return EnvironmentSection(
        factory=factory if ":" in factory else f"{SAMPLES}:{factory}", **{"timeout_s": 5.0, **fields}
    )


@contextmanager
def loaded(**sections: EnvironmentSection) -> Iterator[Environments]:
    """Environments by name, closed at the end."""
    environments = load_environments(sections)
    try:
        yield environments
    finally:
        asyncio.run(environments.aclose())


@contextmanager
def pool_of(factory: str, **fields: Any) -> Iterator[EnvironmentPool]:
    with loaded(only=section(factory, **fields)) as environments:
        yield environments.for_row({})


def taken_and_free(pool: EnvironmentPool) -> tuple[int, int]:
    """Its instances that are leased, or on their way back; and those that wait for a lease."""
    return pool._num_taken, len(pool._free)


def with_one(factory: str, use: Callable[[Environment], Awaitable[Any]], **fields: Any) -> Any:
    """What `use` returns for one leased instance."""

    async def run(pool: EnvironmentPool) -> Any:
        async with pool.lease(1) as (environment,):
            return await use(environment)

    with pool_of(factory, **fields) as pool:
        return asyncio.run(run(pool))


async def call(environment: Environment, name: str, **arguments: Any) -> ToolCallRecord:
    executor = ToolExecutor(environment.tools, max_result_chars=200)
    (record,) = await executor.execute([ToolCall(tool_call_id="call00000", name=name, arguments=arguments)])
    return record
