"""Runtime patches of vLLM, torch and uvicorn, each with its reason.

`plugin` applies those of a whole process, `engine` those of its client. They fit the versions of vLLM in `command`, which have no
hook instead; scripts/check_vllm_versions.py looks at each.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.utils.network import listening_store
from grpo_async.utils.warn_once import WarnOnce

logger = logging.getLogger("vllm.grpo_async")

# ---- uvicorn: Config(http="auto") reads HTTP_PROTOCOLS ----


def limit_silent_connections() -> None:
    """Use our protocol in the API server: vLLM's own arguments do not choose uvicorn's protocol."""
    import uvicorn.config

    uvicorn.config.HTTP_PROTOCOLS["auto"] = "grpo_async.inference.guard:GuardedProtocol"


# ---- torch: a private function of torch.distributed.rendezvous ----


def bind_rendezvous_to_its_own_address() -> None:
    """Make torch's tcp:// rendezvous listen on the address that it was given, and not on every interface."""
    # not `dist.rendezvous`, which is the function of that name
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous._create_c10d_store = _create_store_on_its_own_address


def _create_store_on_its_own_address(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    if rank == 0:
        return listening_store(hostname, port, world_size, timeout, multi_tenant=False, use_libuv=use_libuv)
    return dist.TCPStore(hostname, port, world_size, timeout=timeout, multi_tenant=False, use_libuv=use_libuv)


# ---- vLLM 0.32 on a CPU with AMX, in the process that computes ----


def ask_for_amx() -> None:
    """Ask Linux for the AMX tiles that vLLM's bfloat16 kernels use, if the CPU has them: otherwise the first step ends the
    process by SIGILL. (Up to 0.27 vLLM needs no help.)"""
    torch.cpu._init_amx()


# ---- vLLM, API server: AsyncMPClient.get_output_async ----
#
# AsyncLLM has one task that loops: get one batch of outputs from the engine core's client, then deliver every token in it to its
# request. So if that task asks for the next batch while the client's queue is empty, all earlier tokens have been delivered.
# (The spans of weight versions that vLLM has from 0.32 on come with a request's last output, too late for streaming.)

_ASKED = "_grpo_async_asked"

GetOutput = Callable[[Any], Awaitable[Any]]


def track_get_output(get_output: GetOutput) -> GetOutput:
    """Wrap a client class's `get_output_async` so that `wait_until_delivered` can tell when it is being called."""

    @wraps(get_output)
    async def get_output_async(client: Any) -> Any:
        asked: asyncio.Event = client.__dict__.setdefault(_ASKED, asyncio.Event())
        asked.set()
        outputs = await get_output(client)  # the engine's next output, for as long as it runs
        asked.clear()  # nothing else runs between the batch leaving the queue and this line, so "asked and empty" holds
        return outputs

    return get_output_async


async def wait_until_delivered(client: Any, *, timeout_s: float) -> None:
    """Return when every batch that is now in the client's queue has been delivered to its requests."""
    asked: asyncio.Event | None = client.__dict__.get(_ASKED)
    if asked is None:  # the task has never run: nothing was ever requested
        return
    async with asyncio.timeout(timeout_s):
        while not (asked.is_set() and client.outputs_queue.empty()):
            asked.clear()
            await asked.wait()


def track_deliveries() -> None:
    """Make `wait_until_delivered` possible for the clients of this process."""
    from vllm.v1.engine.core_client import AsyncMPClient

    if not hasattr(AsyncMPClient.get_output_async, "__wrapped__"):
        AsyncMPClient.get_output_async = track_get_output(AsyncMPClient.get_output_async)


# ---- vLLM, API server, one engine: AsyncMPClient.add_request_async, AsyncLLM.output_handler ----


def prepare_requests(engine: Any, salt: Callable[[], str], adapter: Callable[[str], Any]) -> None:
    """Change every request, including those of vLLM's own routes, when it is sent to the engine core: it carries the `salt()` and
    the `adapter(name)` of that moment. On a CPU it loses its seed: a prompt that is prefilled in chunks would end the server ("CPU
    Generator does not use offset")."""
    client = engine.engine_core
    send = client.add_request_async
    is_on_cpu = engine.vllm_config.device_config.device_type == "cpu"
    warn = WarnOnce(logger)

    async def add_request_async(request: Any) -> None:
        request.cache_salt = f"{salt()}/{request.cache_salt or ''}"
        request.lora_request = adapter(request.request_id)
        if is_on_cpu and request.sampling_params is not None and request.sampling_params.seed is not None:
            warn("seed", "a request sets `seed`, which vLLM on a CPU cannot honour; it is ignored, for all requests")
            request.sampling_params.seed = None
        await send(request)

    client.add_request_async = add_request_async


def on_engine_death(engine: Any, callback: Callable[[], None]) -> None:
    """Call `callback` in the event loop when the engine core has died."""
    handler: asyncio.Task[Any] | None = engine.output_handler
    assert handler is not None, "AsyncLLM starts its output task when it is made inside an event loop"
    handler.add_done_callback(lambda _: callback())
