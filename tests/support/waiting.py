"""Waiting on the event loop for what other threads do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Let the loop run until `condition` holds; TimeoutError after `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)
