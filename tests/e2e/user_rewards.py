"""Rewards of a user: those that only keep a run going, faulty ones, and one that hangs or is in no hurry."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from grpo_async.rewards.text import exact_match

DISK_DELAY_S = 4.0

_calls = 0


def by_place(completions: list[Any], **_: Any) -> list[float]:
    """Every group has a signal."""
    return [float(place) for place in range(len(completions))]


async def by_place_in_no_hurry(completions: list[Any], **_: Any) -> list[float]:
    """So that a number of steps is a time, on any machine."""
    await asyncio.sleep(0.5)
    return by_place(completions)


async def by_place_and_slow_by_length(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    await asyncio.sleep(0.05 * max(map(len, completion_ids)))
    return by_place(completions)


async def never_answers(completions: list[Any], **_: Any) -> list[float]:
    """From the 30th call on; asyncio goes on."""
    if _count_call() > 30:
        await asyncio.sleep(3600.0)
    return [float(len(str(completion))) for completion in completions]


def _count_call() -> int:
    global _calls
    _calls += 1
    return _calls


def exact_answer_with_a_slow_disk(**arguments: Any) -> list[float]:
    """Writing a checkpoint takes four seconds longer; patched in the trainer only."""
    module = sys.modules.get("grpo_async.training.checkpoint")
    if module is not None and not getattr(module, "is_slow", False):
        write = module._Storage.write_data

        def slowly(*args: Any) -> Any:
            time.sleep(DISK_DELAY_S)
            return write(*args)

        module._Storage.write_data = slowly
        module.is_slow = True
    return exact_match(**arguments)


def fraction_of_e(completions: list[Any], **_: Any) -> list[float]:
    """Of the characters: about a tenth in English."""
    return [str(text).lower().count("e") / max(1, len(str(text))) for text in completions]
