"""The proximal policy: the one that ratios are taken against (decoupled PPO, AReaL, arXiv 2505.24298)."""

from __future__ import annotations

import torch


def log_linear_logprobs(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, staleness: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of the policy at the start of the step, estimated without a forward pass (A-3PO, of AReaL).

        log prox = log smp + a (log pi - log smp),   a = (v_prox - v_smp) / (v - v_smp)

    per token, without gradient. v_smp is the version that sampled the token, v_prox the trainer's at the start of the step, and
    v = v_prox + 1 the one that the step makes; with staleness d = v_prox - v_smp that is a = d / (d + 1). A token of the newest
    version (d = 0) keeps its sampler's value; the older it is, the closer the proximal policy is to the trained one.
    AReaL's code counts the same formula from one version earlier (v is the trainer's version at the start, v_prox the one before
    it), so there a = (d - 1) / d.
    Worked example: smp = -2, pi = -1, d = 1: a = 1/2, prox = -1.5; d = 3: a = 3/4, prox = -1.25.

    Args:
        logprobs: of the trained policy. (N,)
        sampler_logprobs: (N,)
        staleness: finished steps since the token was sampled. (N,) int64
    """
    age = staleness.clamp(min=0).to(sampler_logprobs.dtype)
    return sampler_logprobs + age / (age + 1.0) * (logprobs.detach() - sampler_logprobs)
