"""What the ranks of the tests do; run by `run_on_ranks`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from grpo_async.batching.minibatch import token_weights
from grpo_async.batching.pack import split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.batching.prefixes import prefix_order
from grpo_async.config.sections import ClippedLoss, LoraSection, ModelSection, OptimizerSection
from grpo_async.records import RolloutSample
from grpo_async.training.context_parallel import ContextGroup
from grpo_async.training.load import build_policy, load_weights
from grpo_async.training.model import Policy, make_mesh, shard_policy
from grpo_async.training.optimizer import make_optimizer
from grpo_async.training.parameters import ShardedParameters
from grpo_async.training.step import StepResult
from tests.support.records import make_sample
from tests.training.tiny_models import step_alone


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
    policy: Policy, optimizer: torch.optim.Optimizer, samples: list[RolloutSample], *, micro_batch_tokens: int = 4096
) -> StepResult:
    """One step on this rank's part of the samples."""
    plan = plan_batch(
        [len(sample.token_ids) for sample in samples],
        world_size=dist.get_world_size(),
        micro_batch_tokens=micro_batch_tokens,
        pack=True,
        prefixes=prefix_order([sample.token_ids for sample in samples]),
    )
    weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=32)
    batches = split_by_rank(samples, weights, plan, trainer_version=0)[dist.get_rank()].pack()
    return step_alone(policy, optimizer, [batches], ClippedLoss(), lr=1e-3)


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
