"""A reward for runs that only have to go on: every group has a signal."""

from __future__ import annotations

import asyncio
from typing import Any


def by_place(completions: list[Any], **_: Any) -> list[float]:
    return [float(place) for place in range(len(completions))]


async def by_place_in_no_hurry(completions: list[Any], **_: Any) -> list[float]:
    """So that a number of steps is a time, on any machine."""
    await asyncio.sleep(0.5)
    return by_place(completions)
