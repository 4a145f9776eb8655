"""Coroutines that run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_of(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Their results, in their order. When one fails, the others are cancelled and its error is raised: without the group that
    asyncio puts around it, and with what it came from."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in running]
