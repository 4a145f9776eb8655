"""Rewards that hang, or take their time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

SCORED = "an answer of an evaluation is being scored"

_calls = 0


async def blocks_the_event_loop(completions: list[Any], **_: Any) -> list[float]:
    """A wait that is none of asyncio's, from the 30th call on: nothing goes on in the rollout thread."""
    global _calls
    _calls += 1
    if _calls > 30:
        time.sleep(3600.0)  # noqa: ASYNC251 - it is the fault that is injected
    return [float(len(str(completion))) for completion in completions]


async def is_slow_at_times(completions: list[Any], **_: Any) -> list[float]:
    """Every call takes 8 s: a step comes to less than a stall, and more than half of one."""
    await asyncio.sleep(8.0)
    return [float(len(str(completion))) for completion in completions]


async def never_answers(completions: list[Any], **_: Any) -> list[float]:
    """From the 30th call on; asyncio goes on."""
    global _calls
    _calls += 1
    if _calls > 30:
        await asyncio.sleep(3600.0)
    return [float(len(str(completion))) for completion in completions]


async def is_slow_for_evaluations(completions: list[Any], **_: Any) -> list[float]:
    """They ask for one completion of a prompt, training for a group."""
    if len(completions) == 1:
        print(SCORED, flush=True)
        await asyncio.sleep(60.0)
    return [float(place) for place in range(len(completions))]
