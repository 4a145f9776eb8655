"""The first requests of a server, made by itself before anybody is let in.

vLLM compiles at the first request of a kind (sampler, log-probabilities; again for several requests at once), on a machine without
its caches for minutes, in which the engine answers nobody: heartbeats would take it for one that hangs, and each restart would
compile again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpo_async.inference.surface import GenerateRequest
from grpo_async.servers.vllm import compat

logger = logging.getLogger("vllm.grpo_async")

_NUM_AT_ONCE = 4
_FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "min_p": 0.01}


async def warm_up(engine: Any) -> None:
    """Generate alone, several at once, with filters, and score. Raises what the engine does."""
    began = time.monotonic()
    await _generate(engine, "alone")
    await asyncio.gather(*(_generate(engine, f"among {number}") for number in range(_NUM_AT_ONCE)))
    await asyncio.gather(*(_generate(engine, f"filtered {number}", **_FILTERS) for number in range(_NUM_AT_ONCE)))
    await _whole(lambda deliver: compat.submit_score(engine, [0, 0, 0], deliver))
    logger.info("warmed up in %.1f s", time.monotonic() - began)


async def _generate(engine: Any, name: str, **fields: Any) -> None:
    request = GenerateRequest(
        request_id=f"warm-up, {name}", token_ids=[0, 0], max_tokens=2, temperature=1.0, ignore_eos=True, **fields
    )
    await _whole(lambda deliver: compat.submit(engine, request, deliver))


async def _whole(submit: Callable[[compat.Deliver], Awaitable[compat.RunningRequest]]) -> None:
    """Until the engine has answered to the end."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(output: compat.EngineOutput | Exception) -> None:
        if ended.done():
            return
        if isinstance(output, Exception):
            ended.set_exception(output)
        elif output.finish_reason is not None:
            ended.set_result(None)

    await submit(deliver)
    await ended  # waits: the engine, whose start inference.startup_timeout_s limits
