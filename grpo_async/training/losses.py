"""Token losses as pure tensor functions. The reduction is not here: per-token weights carry it (see batching.pack)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss per token and what the metrics need. All tensors are (N,)."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def clipped_token_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
) -> TokenLoss:
    """PPO's clipped surrogate per token (arXiv 1707.06347; GRPO arXiv 2402.03300; two epsilons: DAPO arXiv 2503.14476).

        rho = exp(logprob - old_logprob);   loss = -min(rho A, clamp(rho, 1 - epsilon, 1 + epsilon_high) A)

    `old_logprobs` are the sampler's own, so rho is the ratio of trained to sampling policy: staleness is corrected token by token.
    Worked example: A = 2, rho = 1.5, epsilon_high = 0.28: loss = -min(3.0, 2.56) = -2.56, clipped high.

    Args:
        logprobs: of the trained policy, with gradient. (N,)
        old_logprobs: of the policy that sampled. (N,)
        advantages: (N,)
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clamped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clamped * advantages)
    with torch.no_grad():
        clipped_low = (ratio < 1.0 - epsilon) & (advantages < 0)
        clipped_high = (ratio > 1.0 + epsilon_high) & (advantages > 0)
    return TokenLoss(loss=loss, ratio=ratio.detach(), clipped_low=clipped_low, clipped_high=clipped_high)
