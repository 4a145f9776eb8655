"""Soft adaptive policy optimization: loss type sapo."""

from __future__ import annotations

import torch

from grpo_async.training.losses.inputs import LossInputs, TokenLoss
from grpo_async.training.losses.ratios import ratio_of


def sapo_loss(inputs: LossInputs, *, temperature_positive: float, temperature_negative: float) -> TokenLoss:
    """A soft gate in place of the clip (arXiv 2511.20347).

        rho = exp(logprob - old_logprob);   loss = -A sigmoid(tau (rho - 1)) 4 / tau;   tau by the sign of A

    At rho = 1 the gradient is -A, as REINFORCE's; away from it the gate closes smoothly.
    Worked example: A = 2, tau = 1, rho = 1: loss = -2 x 0.5 x 4 = -4, gradient -2. rho = 2: sigmoid(1) = 0.73106, loss = -5.8485.
    """
    ratio = ratio_of(inputs.logprobs - inputs.old_logprobs)
    positive = torch.full_like(inputs.advantages, temperature_positive)
    steepness = torch.where(inputs.advantages > 0, positive, torch.full_like(positive, temperature_negative))
    gate = torch.sigmoid(steepness * (ratio - 1.0)) * 4.0 / steepness
    return TokenLoss(loss=-gate * inputs.advantages, ratio=ratio.detach())
