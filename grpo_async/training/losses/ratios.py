"""Sums over the tokens of each sample, given back to each of its tokens; and ratios that do not overflow."""

from __future__ import annotations

import torch

_LARGEST_LOG = 80.0


def sequence_sum(values: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """At every token, the sum of `values` over its sample.

    A micro-batch has at most as many samples as tokens, so the sums get N places: their number need not come from the device.
    Worked example: values [1, 2, 5], sample_index [0, 0, 1] -> [3, 3, 5].

    Args:
        values: (N,)
        sample_index: (N,) int64, less than N.
    """
    sums = torch.zeros_like(values).index_add(0, sample_index, values)
    return sums[sample_index]


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), at most e^80: what lies above is beyond every clip, and as inf it would make the gradient 0 x inf = NaN, also
    where the loss does not depend on it.

    Args:
        log_ratio: (N,) float32
    """
    return torch.exp(log_ratio.clamp(max=_LARGEST_LOG))


def sequence_mean(values: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """At every token, the mean of `values` over its sample.

    Worked example: values [1, 2, 5], sample_index [0, 0, 1] -> [1.5, 1.5, 5].
    """
    return sequence_sum(values, sample_index) / sequence_sum(torch.ones_like(values), sample_index)
