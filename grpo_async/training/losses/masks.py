"""Tokens that the policy loss leaves out. The KL and the reduction's denominator still count them, as in TRL."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from grpo_async.training.losses.ratios import sequence_mean


def is_on_policy(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sample_index: torch.Tensor,
    *,
    threshold: float,
) -> torch.Tensor:
    """Off-policy sequence mask (OPSM, DeepSeek-V3.2): True for the tokens that are kept. (N,) bool

        keep = A >= 0 or mean over the sample of (sampler - logprob) <= threshold

    Worked example, threshold 0.1: sampler - logprob = [0.3, 0.1 | 0.0, 0.1] and A = -1: means 0.2 and 0.05, so the first sample is
    left out; with A = 1 it is kept.
    """
    divergence = sequence_mean(sampler_logprobs - logprobs.detach(), sample_index)
    return (advantages >= 0) | (divergence <= threshold)


def entropy_threshold(entropy: torch.Tensor, *, share: float) -> torch.Tensor:
    """The entropy that a token must have to be among the `share` with the highest (arXiv 2506.01939). () float64

    It is the (1 - share) quantile, between two values by linear interpolation, as numpy's and TRL's.
    Worked example: entropies [0.1, 0.5, 0.2, 0.9, 0.4], share 0.4: place 0.6 x 4 = 2.4 of [.1, .2, .4, .5, .9] -> 0.44: 0.5 and
    0.9 stay.

    Args:
        entropy: of all trained tokens of the minibatch, of all ranks; may be empty. (n,)
        share: 0 < share <= 1.
    """
    if entropy.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=entropy.device)
    values = torch.sort(entropy.detach().double()).values
    place = (1.0 - share) * (values.numel() - 1)
    below = int(place)
    above = min(below + 1, values.numel() - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def all_entropies(entropy: torch.Tensor, *, num_tokens: int, most_rank_tokens: int) -> torch.Tensor:
    """The entropies of a minibatch on all ranks, the same on each of them, ascending. (num_tokens,) float64

    A collective where there are several ranks. How many each has need not be told to the host: they are filled up to the same
    number with infinity, which sorting puts last.

    Args:
        entropy: of the trained tokens of this rank. (n,), n <= most_rank_tokens
        num_tokens: of all ranks.
    """
    values = entropy.detach().double()
    if dist.is_initialized() and dist.get_world_size() > 1:
        padded = torch.full((most_rank_tokens,), math.inf, dtype=values.dtype, device=values.device)
        padded[: values.numel()] = values
        parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, padded)
        values = torch.cat(parts)
    return torch.sort(values).values[:num_tokens]
