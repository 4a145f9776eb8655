"""Builds what every trainer rank has: process group, sharded policy, optimizer, command channel."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.launch.assignment import Assignment
from grpo_async.training.load import load_policy
from grpo_async.training.optimizers import make_optimizer
from grpo_async.training.parameters import ShardedParameters
from grpo_async.training.ranks import CommandChannel, device_for
from grpo_async.training.shard import shard_policy
from grpo_async.training.workplace import Workplace

_MARGIN_S = 60.0


def join_process_group(place: Assignment, config: ExperimentConfig) -> None:
    """Meet through a private file: on one machine no rank listens on any network address but loopback."""
    kind = device_kind(config)
    if kind == "cuda":
        torch.cuda.set_device(place.local_rank)
    store = dist.FileStore(str(place.store_file), place.world_size) if place.store_file else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=config.training.collective_timeout_s),
    )


def device_kind(config: ExperimentConfig) -> str:
    """ "cpu" or "cuda"; `launch.device: auto` takes the GPU where there is one."""
    if config.launch.device != "auto":
        return config.launch.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def build_workplace(place: Assignment, config: ExperimentConfig, *, tokenizer: Any) -> Workplace:
    """Load the model and shard it over all ranks. A collective. `tokenizer` is exported with the model."""
    kind = device_kind(config)
    device = device_for(kind, place.local_rank)
    policy = load_policy(
        config.model,
        temperature=config.rollout.temperature,
        chunk_tokens=config.training.logprob_chunk_tokens,
        max_model_len=config.inference.max_model_len,
    )
    mesh = init_device_mesh(kind, (place.world_size,))  # waits: the process group has its timeout
    shard_policy(policy, mesh, compute_dtype=getattr(torch, config.model.compute_dtype or config.model.dtype))
    # rank 0 sends its next command only after a server started, an evaluation ended, requests drained, or samples came
    patience_s = sum(
        (
            config.training.queue_timeout_s,
            config.inference.startup_timeout_s,
            config.rollout.rollout_timeout_s,
            config.rollout_function.timeout_s if config.rollout_function else 0.0,
            config.weights.drain_timeout_s,
            config.weights.timeout_s,
            _MARGIN_S,
        )
    )
    return Workplace(
        config=config,
        rundir=place.rundir,
        policy=policy,
        optimizer=make_optimizer(policy, config.optimizer),
        parameters=ShardedParameters(
            policy.model,
            wire_dtype=getattr(torch, config.inference.dtype),
            device=torch.device("cpu") if place.transport == "gloo" else device,
        ),
        channel=CommandChannel(timeout_s=patience_s),
        tokenizer=tokenizer,
        device=device,
        num_ranks=place.world_size,
    )
