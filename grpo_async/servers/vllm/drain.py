"""Knowing when vLLM's frontend has handed out every token that its engine core has sent. Imports nothing of vLLM.

AsyncLLM has one task that loops over: get one batch of outputs from the engine core's client, hand every token in it to its
request. So when that task asks for the next batch while the client's queue is empty, all earlier tokens are handed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

_ASKED = "_grpo_async_asked"

GetOutput = Callable[[Any], Awaitable[Any]]


def mark_asking(get_output: GetOutput) -> GetOutput:
    """Wrap a client class's `get_output_async` so that the client remembers when it is being asked."""

    @wraps(get_output)
    async def get_output_async(client: Any) -> Any:
        asked: asyncio.Event = client.__dict__.setdefault(_ASKED, asyncio.Event())
        asked.set()
        outputs = await get_output(client)  # the engine's next output, for as long as it runs
        asked.clear()  # nothing else runs between the batch leaving the queue and this line, so "asked and empty" holds
        return outputs

    return get_output_async


async def wait_until_handed_out(client: Any, *, timeout_s: float) -> None:
    """Return when every batch that is in the client's queue now is handled.

    Raises:
        TimeoutError: not within `timeout_s`.
    """
    asked: asyncio.Event | None = client.__dict__.get(_ASKED)
    if asked is None:  # the task has never run: nothing was ever requested
        return
    async with asyncio.timeout(timeout_s):
        while not (asked.is_set() and client.outputs_queue.empty()):
            asked.clear()
            await asked.wait()
