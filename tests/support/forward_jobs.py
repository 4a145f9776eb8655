"""What ranks do in the tests of the policy's forward pass; run by `run_on_ranks(..., module=...)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from grpo_async.training.model import Policy, compile_layers, recompute_activations, shard_policy
from grpo_async.training.parameters import whole_of
from tests.training.tiny_families import LENGTHS, ROW_TOKENS, build_family, pack_rows, samples_of


def forward_and_backward(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each case, one after the other: arguments of `_one`."""
    return {name: _one(**case) for name, case in cases.items()}


def _one(
    family: str,
    rows: list[list[list[int]]],
    *,
    recompute: str = "none",
    compiled: bool = False,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One forward and backward of the rank's rows of sample numbers (none: padding only): a weighted sum of each gradient, and
    the loss, which is the sum over ranks of logprobs and entropies."""
    model = build_family(family, **(settings or {}))
    policy = Policy(model, temperature=0.7, chunk_tokens=16)
    recompute_activations(model, recompute)  # type: ignore[arg-type]
    if compiled:
        original = torch.compile
        torch.compile = partial(original, backend="aot_eager")  # another test runs the code that is generated
        compile_layers(model)
        torch.compile = original
    shard_policy(policy, init_device_mesh("cpu", (dist.get_world_size(),)), compute_dtype=torch.float32)
    mine = rows[dist.get_rank()]
    batch = pack_rows(samples_of(LENGTHS), mine, ROW_TOKENS)
    loss = policy(batch, objective=lambda logprobs, entropy, *_: (logprobs + entropy).sum()).objective
    (loss * dist.get_world_size()).backward()  # FSDP averages
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": float(total), "gradients": {name: _fingerprint(p) for name, p in policy.model.named_parameters()}}


def _fingerprint(parameter: torch.Tensor) -> float:
    assert parameter.grad is not None
    flat = whole_of(parameter.grad).double().reshape(-1)
    return float((flat * torch.linspace(1.0, 2.0, flat.numel(), dtype=torch.float64)).sum())
