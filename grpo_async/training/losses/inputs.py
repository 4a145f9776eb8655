"""What every loss sees, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The N trained tokens of one micro-batch, one after another; N >= 1. This is what a loss of your own is given.

    Two samples of 2 and 1 trained tokens: sample_index = [0, 0, 1]. The loss of the minibatch is the sum of weights x loss over
    all its micro-batches and ranks. A shipped loss that is a sum over tokens is given parts of a micro-batch with gradient (their
    samples keep their numbers), and all of it without.
    """

    logprobs: torch.Tensor  # (N,) float32, of the trained policy, with gradient
    old_logprobs: torch.Tensor  # (N,) float32, of the proximal policy (`loss.proximal`), no gradient
    sampler_logprobs: torch.Tensor  # (N,) float32, as the server that sampled reported them
    ref_logprobs: torch.Tensor | None  # (N,) float32, of `loss.reference`; None while loss.beta is 0
    entropy: torch.Tensor  # (N,) float32, nats; with gradient where loss.entropy_bonus is set or the loss is your own
    advantages: torch.Tensor  # (N,) float32, the same for all tokens of a sample
    weights: torch.Tensor  # (N,) float32, the reduction: see batching.weights
    sample_index: torch.Tensor  # (N,) int64, which sample of the micro-batch: 0, 1, ... without gaps
    staleness: torch.Tensor  # (N,) int64, finished steps between sampling and training


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of each token and what the metrics need; all tensors are (N,), all but `loss` without gradient."""

    loss: torch.Tensor
    ratio: (
        torch.Tensor
    )  # importance weight as the loss uses it; clipping apart, which `clipped_low` and `clipped_high` tell
    clipped_low: torch.Tensor | None = None  # bool; None for losses that do not clip
    clipped_high: torch.Tensor | None = None
    is_per_sequence: bool = False  # the ratio is that of the whole sample: figures count samples, not tokens
