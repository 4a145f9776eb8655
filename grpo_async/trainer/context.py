"""Builds what every trainer rank has: process group, sharded policy, reference, optimizer, command channel.

adapters -> activation checkpointing -> compile -> shard -> load; nothing before `load` takes memory for parameters.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.processes.assignment import Assignment
from grpo_async.training.checkpoint import CheckpointWriter
from grpo_async.training.context_parallel import ContextGroup
from grpo_async.training.families import check_tokenizer_size, check_vocabulary
from grpo_async.training.load import build_policy, load_weights
from grpo_async.training.loss import Objective
from grpo_async.training.model import Policy, Reference, compile_layers, compiles, make_mesh, shard_policy
from grpo_async.training.optimizer import make_optimizer
from grpo_async.training.parameters import choose_parameters
from grpo_async.training.ranks import CommandChannel, TrainerContext

_COMMAND_MARGIN_S = 60.0


def join_process_group(assignment: Assignment, config: ExperimentConfig) -> None:
    """Join the other ranks. On one machine they meet through a private file, and no rank listens on any address but loopback; on
    several machines through the store of node 0's torchrun, over the interface of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."""
    kind = device_kind(assignment)
    if kind == "cuda":
        torch.cuda.set_device(assignment.local_rank)
    store = dist.FileStore(str(assignment.file_store), assignment.world_size) if assignment.file_store else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=assignment.rank,
        world_size=assignment.world_size,
        timeout=timedelta(seconds=config.training.collective_timeout_s),
    )


def device_kind(assignment: Assignment) -> str:
    """The device type, "cpu" or "cuda". Raises ConfigError if a GPU is planned but torch cannot use it."""
    if not assignment.on_gpu:
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"launch.device: the run was planned with GPUs, but torch {torch.__version__} sees none; `grpo-async doctor` says why "
            "(a build for CPUs, an old driver), or set launch.device: cpu"
        )
    return "cuda"


def build_context(assignment: Assignment, config: ExperimentConfig, *, tokenizer: Any) -> TrainerContext:
    """Load the model and shard it over all ranks. A collective. `tokenizer` is exported with the model."""
    kind = device_kind(assignment)
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", assignment.local_rank)
    mesh = make_mesh(
        kind, world_size=assignment.world_size, num_nodes=config.launch.trainer_nodes, sharding=config.launch.sharding
    )
    together = ContextGroup.join(config.training.context_parallel, timeout_s=config.training.collective_timeout_s)
    policy = _build_policy(config, config.model, mesh, device, together)
    check_tokenizer_size(len(tokenizer), policy.model.get_input_embeddings().num_embeddings)
    objective = Objective(
        config.loss, num_updates=config.training.num_updates, keeps_sampling_mask=config.keeps_sampling_mask
    )
    reference = _build_reference(config, policy, mesh, device) if config.loss.needs_reference else None
    # rank 0 sends its next command only after a server started, an evaluation ended, or samples came
    command_timeout_s = sum(
        (
            config.training.queue_timeout_s,
            config.inference.startup_timeout_s,
            config.rollout.rollout_timeout_s,
            config.rollout_function.timeout_s if config.rollout_function else 0.0,
            config.rollout.agent.timeout_s if config.rollout.agent else 0.0,
            config.weights.timeout_s,
            _COMMAND_MARGIN_S,
        )
    )
    return TrainerContext(
        config=config,
        run_dir=assignment.run_dir,
        policy=policy,
        optimizer=make_optimizer(policy, config.optimizer),
        objective=objective,
        reference=reference,
        parameters=choose_parameters(
            policy.model,
            config.model,
            served_dtype=getattr(torch, config.inference.resolved_dtype),
            # only rank 0 sends; the other ranks leave gathered tensors on their device
            device=torch.device("cpu") if assignment.transport == "gloo" and assignment.rank == 0 else device,
        ),
        channel=CommandChannel(timeout_s=command_timeout_s),
        checkpoints=CheckpointWriter(assignment.run_dir, timeout_s=config.training.collective_timeout_s),
        tokenizer=tokenizer,
        device=device,
        world_size=assignment.world_size,
    )


def _build_policy(
    config: ExperimentConfig,
    section: ModelSection,
    mesh: DeviceMesh,
    device: torch.device,
    together: ContextGroup | None,
) -> Policy:
    training = config.training
    policy = build_policy(
        section,
        temperature=config.rollout.temperature,
        chunk_tokens=training.resolved_chunk_tokens,
        max_model_len=config.inference.max_model_len,
        device_type=device.type,
        router_aux=config.loss.router_aux if section is config.model else 0.0,
        context=together,
    )
    if compiles(training.compile, policy, device.type):
        compile_layers(policy.model, may_fail=training.compile is None)
    shard_policy(
        policy,
        mesh,
        compute_dtype=getattr(torch, section.resolved_compute_dtype),
        reshard_after_forward=training.reshard_after_forward,
        cpu_offload=training.cpu_offload,
    )
    load_weights(policy, section, device=torch.device("cpu") if training.cpu_offload else device, seed=config.run.seed)
    return policy


def _build_reference(config: ExperimentConfig, policy: Policy, mesh: DeviceMesh, device: torch.device) -> Reference:
    """The policy without its adapters, or a separate model: a frozen one in the compute dtype, since FSDP gathers in it anyway; a
    synced one in the policy's dtype, so that small updates are not rounded away."""
    if config.reference_is_policy:
        return Reference(policy, without_adapters=True)
    model, wanted = config.model, config.loss.reference
    path = model.path if wanted == "initial" else wanted
    section = model.model_copy(
        update={
            "path": path,
            "revision": model.revision if wanted == "initial" else None,
            "dtype": model.dtype if config.loss.sync_ref_model else model.resolved_compute_dtype,
            "lora": None,
            "activation_checkpointing": "none",
        }
    )
    try:
        other = _build_policy(config, section, mesh, device, policy.context)
    except ConfigError as error:
        if wanted == "initial":
            raise
        raise ConfigError(str(error).replace("model.path:", "loss.reference:", 1)) from error
    ours, theirs = (each.model.config.get_text_config().vocab_size for each in (policy, other))
    check_vocabulary(path, ours=ours, theirs=theirs)
    needs_rows = other.one_sample_per_row and not policy.one_sample_per_row
    if config.training.pack and (needs_rows or policy.shares_prefixes > other.shares_prefixes):
        raise ConfigError(f"loss.reference: layers of {path!r} carry a state along the row; set training.pack: false")
    return Reference(other)
