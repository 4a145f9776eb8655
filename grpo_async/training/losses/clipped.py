"""PPO's clipped surrogate on the ratio of each token: loss types grpo, bnpo, dr_grpo and dapo, which differ in reduction only."""

from __future__ import annotations

import torch

from grpo_async.training.losses.inputs import LossInputs, TokenLoss
from grpo_async.training.losses.ratios import ratio_of


def clipped_loss(inputs: LossInputs, *, epsilon: float, epsilon_high: float, delta: float | None = None) -> TokenLoss:
    """Clipped surrogate per token (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; two epsilons: DAPO, arXiv 2503.14476).

        rho = exp(logprob - old_logprob)
        loss = -min(min(rho, delta) A, clamp(rho, 1 - epsilon, 1 + epsilon_high) A)

    Without delta a bad token (A < 0) that became likelier has an unbounded loss; delta bounds it (INTELLECT-2, arXiv 2505.07291).
    Worked example: A = 2, rho = 1.5, epsilon_high = 0.28: loss = -min(3.0, 2.56) = -2.56, clipped high.
    A = -2, rho = 5: loss = -min(-10, -2.56) = 10; with delta = 4: -min(-8, -2.56) = 8.
    """
    ratio = ratio_of(inputs.logprobs - inputs.old_logprobs)
    return clipped_surrogate(ratio, inputs.advantages, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)


def clipped_surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    is_per_sequence: bool = False,
) -> TokenLoss:
    """The formula of `clipped_loss`, for ratios of tokens or of sequences. (N,) each."""
    capped = ratio if delta is None else ratio.clamp(max=delta)
    clamped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    loss = -torch.minimum(capped * advantages, clamped * advantages)
    known = ratio.detach()
    return TokenLoss(
        loss=loss,
        ratio=capped.detach(),
        clipped_low=(known < 1.0 - epsilon) & (advantages < 0),
        clipped_high=(known > 1.0 + epsilon_high) & (advantages > 0),
        is_per_sequence=is_per_sequence,
    )
