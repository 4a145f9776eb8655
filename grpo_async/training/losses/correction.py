"""Importance weights between the policy that sampled and the proximal one."""

from __future__ import annotations

from typing import Literal

import torch

from grpo_async.training.losses.ratios import sequence_sum


def correction_weights(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    sample_index: torch.Tensor,
    *,
    level: Literal["token", "sequence"],
    action: Literal["truncate", "mask", "none"],
    cap: float,
    floor: float | None = None,
) -> torch.Tensor:
    """Weight of each token, without gradient: pi_prox / pi_smp of decoupled PPO (arXiv 2505.24298), truncated (TIS) or masked
    (MIS).

        w = exp(old - sampler)                      level token
        w = exp(sum of (old - sampler))             level sequence, over the trained tokens of the sample
        truncate: clamp(w, floor, cap)      mask: w where floor <= w <= cap, else 0      none: w

    Worked example, old - sampler = [0.5, 1.0 | -0.2] in two samples, cap 3: token: [1.6487, 2.7183, 0.8187], nothing changes;
    sequence: exp(1.5) = 4.4817, so truncate gives [3, 3, 0.8187] and mask [0, 0, 0.8187].

    Args:
        old_logprobs: of the proximal policy. (N,)
        sampler_logprobs: (N,)
        sample_index: (N,) int64
    """
    difference = old_logprobs.detach() - sampler_logprobs
    if level == "sequence":
        difference = sequence_sum(difference, sample_index)
    weights = torch.exp(difference)
    if action == "truncate":
        return weights.clamp(min=floor, max=cap)
    if action == "mask":
        outside = weights > cap
        if floor is not None:
            outside |= weights < floor
        return weights.masked_fill(outside, 0.0)
    return weights
