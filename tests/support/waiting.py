"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Let the loop run until `condition` holds; TimeoutError after `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0, *, every_s: float = 0.01) -> bool:
    """Whether `condition` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def is_alive(pid: int) -> bool:
    """Whether a process runs. Where nobody reaps orphans, as in some containers, a killed one stays as a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
