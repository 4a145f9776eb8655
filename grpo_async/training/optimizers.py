"""Makes the optimizer of a policy."""

from __future__ import annotations

import torch

from grpo_async.config.model_sections import OptimizerSection
from grpo_async.training.policy import Policy


def make_optimizer(policy: Policy, section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101); biases and norms are not decayed."""
    decayed = [parameter for parameter in policy.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in policy.parameters() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=section.lr, betas=section.betas, eps=section.eps)
