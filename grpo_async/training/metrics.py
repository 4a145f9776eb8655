"""Metrics of a training step: what each optimizer update computed, summed on the device and brought to the host in one transfer.

Names and definitions are TRL's where it has the metric. Weights and clips that belong to whole samples are averaged over samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_async.training.loss import Objective, ObjectiveOutput, kl_k3, sequence_mean, sequence_sum
from grpo_async.training.parameters import num_ranks

_SUMS = (
    "loss", "policy_loss", "tokens", "entropy", "kl", "difference", "sampling_kl",
    "weights", "weights_squared", "num_weights", "clipped_low", "clipped_high", "num_clips",
    "importance_masked", "off_policy", "router_aux",
)  # fmt: skip
_MAXIMA = ("weight_max", "minus_weight_min", "difference_max", "minus_low_min", "high_max")


class UpdateSums:
    """Sums and maxima over the micro-batches of one update. Float64, on the device."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._objective = objective
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.full((len(_MAXIMA),), -math.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, output: ObjectiveOutput) -> None:
        inputs, token_loss = output.inputs, output.token_loss
        logprobs = inputs.logprobs.detach()
        ones = torch.ones_like(logprobs)
        zeros = torch.zeros_like(logprobs)
        of_sample = 1.0 / sequence_sum(ones, inputs.sample_index)  # adds up to 1 over the tokens of a sample
        per_weight = of_sample if self._objective.has_sequence_weights else ones
        per_clip = of_sample if token_loss.is_per_sequence else ones
        difference = (logprobs - inputs.sampler_logprobs).double().abs()
        weights = output.importance_weights.double()
        low = zeros if token_loss.clipped_low is None else token_loss.clipped_low.to(logprobs.dtype)
        high = zeros if token_loss.clipped_high is None else token_loss.clipped_high.to(logprobs.dtype)
        # in the order of _SUMS
        self._sums += torch.stack(
            [
                output.total.detach().double(),
                output.policy_loss.double(),
                ones.sum().double(),
                inputs.entropy.detach().sum().double(),
                (zeros if output.kl is None else output.kl).sum().double(),
                difference.sum().double(),
                kl_k3(inputs.sampler_logprobs.double(), logprobs.double()).sum(),
                (per_weight * weights).sum(),
                (per_weight * weights**2).sum(),
                per_weight.sum().double(),
                (per_clip * low).sum().double(),
                (per_clip * high).sum().double(),
                per_clip.sum().double(),
                (zeros if output.is_importance_masked is None else output.is_importance_masked).sum().double(),
                (zeros if output.is_off_policy is None else output.is_off_policy).sum().double(),
                (zeros.sum() if output.router_aux is None else output.router_aux).double(),
            ]
        )
        # in the order of _MAXIMA
        new = [
            weights.max(),
            -weights.min(),
            difference.max(),
            -sequence_mean(low, inputs.sample_index).min(),
            sequence_mean(high, inputs.sample_index).max(),
        ]
        torch.maximum(self._maxima, torch.stack([value.double() for value in new]), out=self._maxima)

    def gather(self, square_norm: torch.Tensor, *, before_sync: Callable[[], None] = lambda: None) -> UpdateMetrics:
        """Gather the sums of all ranks on the host: one collective and the only transfer of an update.
        `square_norm`: this rank's part (). `before_sync` is called when all of this is launched, before the host waits for the
        device."""
        mine = torch.cat([self._sums, self._maxima, square_norm.detach().double().reshape(1)])
        of_ranks = mine[None]  # (world, 22)
        if num_ranks() > 1:
            parts = [torch.empty_like(mine) for _ in range(num_ranks())]
            dist.all_gather(parts, mine)
            of_ranks = torch.stack(parts)
        before_sync()
        columns = list(zip(*of_ranks.tolist(), strict=True))
        maxima = len(_SUMS)  # where they begin
        return UpdateMetrics(
            sums={name: sum(column) for name, column in zip(_SUMS, columns[:maxima], strict=True)},
            maxima={name: max(column) for name, column in zip(_MAXIMA, columns[maxima:-1], strict=True)},
            grad_norm=math.sqrt(sum(columns[-1])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """One update on the host, over all ranks; names as in `_SUMS` and `_MAXIMA`."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float

    @property
    def loss(self) -> float:
        return self.sums["loss"]

    @property
    def num_tokens(self) -> int:
        return int(self.sums["tokens"])

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def step_metrics(updates: Sequence[UpdateMetrics], objective: Objective) -> dict[str, float]:
    """Metrics of a step from its updates (at least one): means over their tokens; losses and norms are means over updates."""
    total = {name: sum(update.sums[name] for update in updates) for name in _SUMS}
    largest = {name: max(update.maxima[name] for update in updates) for name in _MAXIMA}
    section = objective.section
    num_updates, num_tokens = len(updates), max(total["tokens"], 1.0)
    num_weights, num_clips = max(total["num_weights"], 1.0), max(total["num_clips"], 1.0)
    mean_square = total["weights_squared"] / num_weights
    metrics = {
        "loss": total["loss"] / num_updates,
        "policy_loss": total["policy_loss"] / num_updates,
        "entropy": total["entropy"] / num_tokens,
        "grad_norm": sum(update.grad_norm for update in updates) / num_updates,
        "sampling/sampling_logp_difference/mean": total["difference"] / num_tokens,
        "sampling/sampling_logp_difference/max": largest["difference_max"],
        "sampling/kl": total["sampling_kl"] / num_tokens,
        "sampling/importance_sampling_ratio/mean": total["weights"] / num_weights,
        "sampling/importance_sampling_ratio/min": -largest["minus_weight_min"],
        "sampling/importance_sampling_ratio/max": largest["weight_max"],
        # effective sample size as a fraction of the count: (sum w)^2 / (n sum w^2)
        "sampling/ess": (total["weights"] / num_weights) ** 2 / mean_square if mean_square > 0 else 0.0,
        "sampling/chi_squared": mean_square - 1.0,
    }
    if objective.clips:
        metrics |= {
            "clip_ratio/low_mean": total["clipped_low"] / num_clips,
            "clip_ratio/low_min": -largest["minus_low_min"],
            "clip_ratio/high_mean": total["clipped_high"] / num_clips,
            "clip_ratio/high_max": largest["high_max"],
            "clip_ratio/region_mean": (total["clipped_low"] + total["clipped_high"]) / num_clips,
        }
    if section.router_aux:
        metrics["router_aux"] = total["router_aux"] / num_updates
    if section.needs_reference:
        metrics["kl"] = total["kl"] / num_tokens
    if section.correction is not None and section.correction.action == "mask":
        metrics["masked/correction"] = total["importance_masked"] / num_tokens
    if section.masks_samples:
        metrics["masked/off_policy"] = total["off_policy"] / num_tokens
    return metrics
