"""Runtime patches of vLLM, torch and uvicorn, each with its reason.

`plugin` applies those of a whole process, `engine` those of its client. They fit the versions of vLLM in `command`, which have no
hook instead; scripts/check_vllm_versions.py looks at each.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from datetime import timedelta
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


# ---- vLLM on a CPU with AMX, in the process that computes ----


def ask_for_amx() -> None:
    """Ask Linux for the AMX tiles that vLLM's bfloat16 kernels use, if the CPU has them: otherwise the first step ends the
    process by SIGILL."""
    torch.cpu._init_amx()


def rotate_every_head() -> None:
    """Give the kernel that rotates queries and keys on a CPU (n, heads * size) in place of (n, heads, size), of which it
    rotates the first head alone: LFM2 would sample from another policy."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    rotate = ops.rotary_embedding
    if not current_platform.is_cpu() or rotate.__module__ == __name__:  # done before: some processes register twice
        return

    def rotary_embedding(positions: Any, query: Any, key: Any, *rest: Any, **options: Any) -> None:
        query, key = (None if each is None else each.view(*positions.shape, -1) for each in (query, key))
        rotate(positions, query, key, *rest, **options)

    ops.rotary_embedding = rotary_embedding


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
