"""Losses as pure tensor functions, one file for each family.

    inputs       what a loss sees (LossInputs) and says (TokenLoss)
    clipped, gspo, cispo, sapo, user_loss       the policy loss of each token
    proximal     the policy that ratios are taken against
    correction   weights for the difference between sampler and proximal policy
    masks        tokens that are left out: off-policy completions, tokens of low entropy
    kl           divergence from a reference
    sequences    sums over the tokens of each completion

No reduction is here: weights of tokens carry it (batching.weights). Which of them make up the loss: training.objective.
A loss of your own is f(inputs: LossInputs, **arguments) -> tensor (N,), see `user_loss`.
"""

from __future__ import annotations

from grpo_async.training.losses.inputs import LossInputs, TokenLoss

__all__ = ["LossInputs", "TokenLoss"]
