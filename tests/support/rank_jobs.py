"""What the ranks of the tests do; run by `run_on_ranks`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from grpo_async.batching.minibatch import token_weights
from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.batching.prefixes import prefix_order
from grpo_async.config.sections import BaseLoss, ClippedLoss, LoraSection, ModelSection, OptimizerSection
from grpo_async.records import RolloutSample
from grpo_async.training.context_parallel import ContextGroup
from grpo_async.training.load import build_policy, load_weights
from grpo_async.training.loss import Objective
from grpo_async.training.model import Policy, Reference, make_mesh, shard_policy
from grpo_async.training.optimizer import make_optimizer
from grpo_async.training.parameters import ShardedParameters
from grpo_async.training.step import StepResult, train_step
from tests.support.records import make_sample


def random_samples(count: int = 12, *, seed: int = 0, spread: float = 0.1) -> list[RolloutSample]:
    """Ragged samples with random tokens, advantages and sampler logprobs, of policy versions 0 to 3."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(length: int) -> list[int]:
        return torch.randint(3, 300, (length,), generator=generator).tolist()

    samples = []
    for number in range(count):
        lengths = torch.randint(2, 20, (2,), generator=generator).tolist()
        logprobs = (-6.0 + torch.randn(lengths[1], generator=generator) * spread).tolist()
        advantage = float(torch.randn(1, generator=generator))
        samples.append(
            make_sample(
                prompt=numbers(lengths[0]),
                completion=numbers(lengths[1]),
                advantage=advantage,
                logprobs=logprobs,
                version=number % 4,
            )
        )
    return samples


def build(
    model: str,
    *,
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw",
    lora: dict[str, Any] | None = None,
    num_nodes: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    compute_dtype: str = "float32",
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    **settings: Any,
) -> tuple[Policy, torch.optim.Optimizer]:
    """A policy as a run builds it: on "meta", sharded, then loaded."""
    adapters = LoraSection(**lora) if lora else None
    section = ModelSection.model_validate({"path": model, "lora": adapters, "compute_dtype": compute_dtype, **settings})
    policy = build_policy(
        section,
        temperature=1.0,
        chunk_tokens=16,
        max_model_len=256,
        device_type=device,
        context=ContextGroup.join(context_parallel, timeout_s=60.0),
    )
    mesh = make_mesh(device, world_size=dist.get_world_size(), num_nodes=num_nodes, sharding="hybrid")
    computed = getattr(torch, compute_dtype)
    shard_policy(
        policy, mesh, compute_dtype=computed, reshard_after_forward=reshard_after_forward, cpu_offload=cpu_offload
    )
    load_weights(policy, section, device=torch.device("cpu" if cpu_offload else device))
    return policy, make_optimizer(policy, OptimizerSection(type=optimizer, lr=1e-3, weight_decay=0.1))


def one_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: list[RolloutSample],
    *,
    loss: BaseLoss | None = None,
    num_minibatches: int = 1,
    reference: Reference | None = None,
    trainer_version: int = 0,
    micro_batch_tokens: int = 4096,
    pack: bool = True,
    shares_prefixes: bool = True,
    loss_scale: float = 1.0,
) -> StepResult:
    """One step on this rank's part of the samples, cut into minibatches of neighbors."""
    section = loss or ClippedLoss()
    size = -(-len(samples) // num_minibatches)
    minibatches: list[list[MicroBatch]] = []
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        lengths = [len(sample.token_ids) for sample in part]
        world_size = dist.get_world_size()
        plan = plan_batch(
            lengths,
            world_size=world_size,
            micro_batch_tokens=micro_batch_tokens,
            pack=pack,
            prefixes=prefix_order([sample.token_ids for sample in part]) if shares_prefixes else None,
        )
        weights = token_weights(part, plan, reduction=section.resolved_reduction, max_completion_tokens=32)
        minibatches.append(split_by_rank(part, weights, plan, trainer_version=trainer_version)[dist.get_rank()].pack())
    return train_step(
        policy,
        optimizer,
        minibatches,
        objective=Objective(section, num_updates=num_minibatches),
        reference=reference,
        lr=1e-3,
        max_grad_norm=0.5,
        device=torch.device("cpu"),
        loss_scale=loss_scale,
    )


def fingerprint(policy: Policy) -> dict[str, float]:
    """A weighted sum per parameter: changes when any element changes or moves."""
    parameters = ShardedParameters(policy.model, wire_dtype=torch.float32)
    values = {}
    specs = iter(parameters.specs)
    for bucket in parameters.buckets(1 << 16):
        for tensor in bucket:
            flat = tensor.double().cpu().reshape(-1)
            values[next(specs).name] = float((flat * torch.linspace(1.0, 2.0, flat.numel())).sum())
    return values
