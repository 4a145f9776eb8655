"""What the plan says of memory, and how a GPU is divided that the trainer shares with vLLM.

vLLM measures free memory at its start; other work on the GPU at that moment makes the result wrong. So on a shared GPU it is told
the size of its KV cache (`--kv-cache-memory-bytes`), at the first start and at every restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_async.checks.memory import ADVICE, ModelSize, bytes_beside_vllm, describe, server_memory, trainer_memory
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.launch.gpus import GpuShares
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.servers.vllm.command import CPU_CACHE_MB, OWN_GPU_FRACTION
from grpo_async.utils.text import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What each trainer rank and each server takes, in words ("": it is not known); `cache_mb`: what a vLLM that shares its GPU is
    to take for its KV cache."""

    trainer: str = ""
    server: str = ""
    cache_mb: int | None = None
    notes: tuple[str, ...] = ()


def plan_memory(config: ExperimentConfig, engine: EngineChoice, shares: GpuShares, gpu_bytes: int | None) -> MemoryPlan:
    """Estimate what each process takes.

    Args:
        gpu_bytes: of the smallest GPU; None: there is none, or its size is not known.
    """
    options, model = config.inference.vllm, ModelSize.read(config.model.path)
    num_sharing = shares.most_servers_on_a_gpu if shares.shared and engine.engine == "vllm" else 0
    cache_mb = options.kv_cache_mb if engine.on_gpu else options.kv_cache_mb or CPU_CACHE_MB
    if num_sharing and cache_mb is None and (model is None or gpu_bytes is None):
        missing = "the size of the model (a hub name)" if model is None else "the memory of the GPU"
        raise ConfigError(
            f"inference.vllm.kv_cache_mb: trainer and server share GPU {','.join(shares.shared)}, and {missing} is not known "
            "before the start, so it cannot be divided; set how many MiB vLLM should use for the KV cache"
        )
    if model is None:
        return MemoryPlan(trainer="not known before the model is loaded", cache_mb=cache_mb if num_sharing else None)
    trainer, server = trainer_memory(config, model), server_memory(config, model, config.inference.max_model_len)
    beside = bytes_beside_vllm(config, model) if num_sharing else 0.0
    sequence = server.pop("KV cache")
    if cache_mb is None and gpu_bytes is not None:
        room = (options.gpu_memory_utilization or OWN_GPU_FRACTION) * gpu_bytes
        if num_sharing and options.gpu_memory_utilization is None:
            room = (gpu_bytes - beside) / num_sharing
        # with less than a sequence vLLM does not start
        cache_mb = max(math.floor((room - sum(server.values())) / 2**20), math.ceil(sequence / 2**20))
    text = ""
    needs = {"the trainer": sum(trainer.values()) if shares.trainer else 0.0}
    if engine.engine == "vllm" and cache_mb is not None:
        server["KV cache"] = cache_mb << 20
        tokens = server["KV cache"] / sequence * config.inference.max_model_len
        text = f"{describe(server)}, room for {tokens:,.0f} tokens, estimated"
        who = "the trainer and vLLM next to it" if num_sharing else "vLLM"
        needs[who] = beside + (num_sharing or 1) * sum(server.values())
    return MemoryPlan(
        trainer=f"{describe(trainer)}, estimated",
        server=text,
        cache_mb=cache_mb if num_sharing else None,
        notes=tuple(
            f"probably too little memory: {who} {format_bytes(size)}, a GPU {format_bytes(gpu_bytes)}; {ADVICE}"
            for who, size in needs.items()
            if gpu_bytes is not None and size > gpu_bytes
        ),
    )
