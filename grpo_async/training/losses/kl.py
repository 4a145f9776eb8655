"""Divergence from a reference policy."""

from __future__ import annotations

import torch


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimator of KL(policy || reference) per token: unbiased, never negative (http://joschu.net/blog/kl-approx.html; GRPO,
    arXiv 2402.03300, equation 4). Its gradient goes through `logprobs`.

        exp(ref - logprob) - (ref - logprob) - 1

    Worked example: ref - logprob = 0.5: 1.6487 - 0.5 - 1 = 0.1487, gradient 1 - 1.6487 = -0.6487.
    """
    difference = ref_logprobs - logprobs
    return torch.exp(difference) - difference - 1.0
