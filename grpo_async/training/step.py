"""One optimizer step: forward and backward over the micro-batches of this rank, one clip, one update.

Gradients are summed, not averaged: the weights of the tokens already hold the one denominator of the step. FSDP averages over
ranks, so the loss is multiplied by their number. A step whose loss or gradient is not finite changes nothing and is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.loss_sections import ClippedLoss
from grpo_async.training.losses import TokenLoss, clipped_token_loss
from grpo_async.training.policy import Policy, PolicyOutput

_NUM_SUMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did. `is_finite` is False when the update was skipped."""

    loss: float
    grad_norm: float
    num_tokens: int
    is_finite: bool
    metrics: dict[str, float]


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    loss: ClippedLoss,
    lr: float,
    max_grad_norm: float,
    device: torch.device,
) -> StepResult:
    """Run one step on this rank; every rank calls it with as many micro-batches.

    Args:
        lr: learning rate of this step.
        max_grad_norm: total norm over all ranks that gradients are clipped to.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=device)
    extremes = torch.full((4,), -math.inf, dtype=torch.float64, device=device)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for number, cpu_batch in enumerate(micro_batches):
        batch = cpu_batch.to(device)
        # gradients travel between ranks once, after the last micro-batch
        if isinstance(policy, torch.distributed.fsdp.FSDPModule):
            policy.set_requires_gradient_sync(number == len(micro_batches) - 1)
        output: PolicyOutput = policy(batch)
        if output.anchor is not None:
            torch.autograd.backward(output.anchor)
            continue
        logprobs = output.logprobs
        tokens = clipped_token_loss(
            logprobs,
            batch.sampler_logprobs,
            batch.advantages,
            epsilon=loss.epsilon,
            epsilon_high=loss.epsilon_high,
        )
        total = (tokens.loss * batch.weights).sum()
        torch.autograd.backward(total * world_size)
        _accumulate(sums, extremes, batch, logprobs.detach(), output.entropy, tokens, total.detach())
    norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    full_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if world_size > 1:
        dist.all_reduce(sums)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    # the only transfer to the host in a step
    numbers = torch.cat([sums, extremes, full_norm.detach().double().reshape(1)]).tolist()
    loss_value, grad_norm = numbers[0], numbers[-1]
    is_finite = math.isfinite(loss_value) and math.isfinite(grad_norm)
    if is_finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss=loss_value,
        grad_norm=grad_norm,
        num_tokens=int(numbers[1]),
        is_finite=is_finite,
        metrics=_metrics(numbers, lr=lr),
    )


def _accumulate(
    sums: torch.Tensor,
    extremes: torch.Tensor,
    batch: MicroBatch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    tokens: TokenLoss,
    total: torch.Tensor,
) -> None:
    difference = (logprobs - batch.sampler_logprobs).abs()
    sums += torch.stack(
        [
            total.double(),
            torch.ones_like(logprobs).sum().double(),
            entropy.sum().double(),
            tokens.ratio.sum().double(),
            (tokens.ratio.double() ** 2).sum(),
            difference.sum().double(),
            tokens.clipped_low.sum().double(),
            tokens.clipped_high.sum().double(),
        ]
    )
    new = [tokens.ratio.max(), -tokens.ratio.min(), difference.max(), batch.staleness.max()]
    torch.maximum(extremes, torch.stack([value.double() for value in new]), out=extremes)


def _metrics(numbers: Sequence[float], *, lr: float) -> dict[str, float]:
    loss, count, entropy, ratio, ratio_squared, difference, low, high = numbers[:_NUM_SUMS]
    ratio_max, minus_ratio_min, difference_max, _ = numbers[_NUM_SUMS : _NUM_SUMS + 4]
    count = max(count, 1.0)
    return {
        "policy_loss": loss,
        "num_tokens": count,
        "entropy": entropy / count,
        "grad_norm": numbers[-1],
        "lr": lr,
        "clip_ratio/low_mean": low / count,
        "clip_ratio/high_mean": high / count,
        "clip_ratio/region_mean": (low + high) / count,
        "sampling/importance_sampling_ratio/mean": ratio / count,
        "sampling/importance_sampling_ratio/min": -minus_ratio_min,
        "sampling/importance_sampling_ratio/max": ratio_max,
        "sampling/sampling_logp_difference/mean": difference / count,
        "sampling/sampling_logp_difference/max": difference_max,
        # effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2)
        "sampling/ess": ratio**2 / (count * ratio_squared) if ratio_squared > 0 else 0.0,
    }
