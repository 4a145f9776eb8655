"""Clipped importance sampling policy optimization: loss type cispo."""

from __future__ import annotations

import torch

from grpo_async.training.losses.inputs import LossInputs, TokenLoss


def cispo_loss(inputs: LossInputs, *, epsilon_high: float) -> TokenLoss:
    """REINFORCE with capped ratios: no token loses its gradient (MiniMax-M1, arXiv 2506.13585, equation 4).

        rho = exp(logprob - old_logprob);   loss = -min(rho, epsilon_high) A logprob, without gradient through rho

    epsilon_high is the cap itself, not a distance from 1. `clipped_high` counts capped tokens with A > 0, as TRL does.
    Worked example: A = 2, logprob = -1, rho = 7, epsilon_high = 5: loss = -5 x 2 x -1 = 10, its gradient -5 x 2 = -10.
    """
    ratio = torch.exp(inputs.logprobs.detach() - inputs.old_logprobs)
    capped = ratio.clamp(max=epsilon_high)
    return TokenLoss(
        loss=-capped * inputs.advantages * inputs.logprobs,
        ratio=capped,
        clipped_low=torch.zeros_like(ratio, dtype=torch.bool),
        clipped_high=(ratio > epsilon_high) & (inputs.advantages > 0),
    )
