"""Makes the optimizer of a policy. It moves what requires a gradient: everything, or the adapters.

Matrices are decayed, biases and norms are not. Each kind works on the shards of FSDP and gives on any number of ranks what one rank
would give; its state is made of tensors that torch's distributed checkpoint can divide anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from grpo_async.config.model_sections import OptimizerSection
from grpo_async.errors import ConfigError
from grpo_async.training.adamw_8bit import AdamW8bit
from grpo_async.training.muon import Muon
from grpo_async.training.policy import Policy
from grpo_async.training.recompute import decoder_layers


def make_optimizer(policy: Policy, section: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.type` names; every group's `lr` is set anew before each step.

    Raises:
        ConfigError: what it needs is not installed, or there is nothing for it to do.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    match section.type:
        case "adamw":
            groups = _decay_groups(trained, section)
            return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, foreach=True)
        case "adamw_8bit":
            if find_spec("bitsandbytes") is None:
                raise ConfigError(
                    "optimizer.type: adamw_8bit needs bitsandbytes, which is not installed; install grpo-async[quantization], or "
                    "set adamw"
                )
            groups = _decay_groups(trained, section)
            return AdamW8bit(groups, lr=section.lr, betas=section.betas, eps=section.eps)
        case "muon":
            return _make_muon(policy, trained, section)


def give_state_to_all(optimizer: torch.optim.Optimizer) -> None:
    """Begin the state of parameters that never had a gradient, as their first update would; no weight moves, and no other state.

    Without it a checkpoint has no state of them, and a load, which asks for that of every parameter, fails. Every rank calls it
    (Muon's update is a collective). Call it between two steps, when gradients are gone.

    Raises:
        ValueError: a parameter has a gradient.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    new = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    if not new:
        return
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError("gradients are waiting for an update, which beginning the other parameters' state would make")
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # what decays weights is multiplied by it
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for parameter in new:
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()  # that was none: bias correction begins with the first gradient


def _decay_groups(parameters: Sequence[nn.Parameter], section: OptimizerSection) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _make_muon(policy: Policy, trained: Sequence[nn.Parameter], section: OptimizerSection) -> Muon:
    """Muon for the matrices of the layers, and for fused experts, which are stacks of matrices; AdamW for the rest."""
    in_layers = {id(parameter) for layer in decoder_layers(policy.model) for parameter in layer.parameters()}
    matrices = [parameter for parameter in trained if parameter.ndim in (2, 3) and id(parameter) in in_layers]
    chosen = {id(parameter) for parameter in matrices}
    if not matrices:
        raise ConfigError("optimizer.type: muon moves matrices of the layers, and none of them is trained; set adamw")
    muon = {"params": matrices, "weight_decay": section.weight_decay, "is_muon": True}
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
    adamw = [{**group, "is_muon": False} for group in _decay_groups(rest, section)]
    return Muon([muon, *adamw], lr=section.lr, momentum=section.momentum, betas=section.betas, eps=section.eps)
