"""The optimizer of a policy: AdamW or Muon, on the shards of FSDP. Weight decay applies to matrices, not to biases and norms.

(torch.optim.Muon does not support stacks of matrices, such as fused experts, and cannot share an optimizer with AdamW.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from grpo_async.config.sections import OptimizerSection
from grpo_async.errors import ConfigError
from grpo_async.training.model import Policy, decoder_layers
from grpo_async.training.parameters import local_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def make_optimizer(policy: Policy, section: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.type` names, with the state of every parameter already allocated: the first step takes as much
    memory as all others, and checkpoints also have the state of parameters that never get a gradient. A collective."""
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    optimizer: torch.optim.Optimizer
    if section.type == "muon":
        optimizer = _make_muon(policy, trained, section)
    else:
        groups = _decay_groups(trained, section)
        optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
    _begin_state(optimizer)
    return optimizer


def _begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that each parameter's first update begins with. No weight changes."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # weight decay is multiplied by it
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()  # that was not a real step: bias correction begins with the first gradient


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not name.endswith("bias")  # the biases of fused experts have two dimensions


def _decay_groups(parameters: Mapping[str, nn.Parameter], section: OptimizerSection) -> list[dict[str, Any]]:
    decayed = [parameter for name, parameter in parameters.items() if _is_matrix(name, parameter)]
    others = [parameter for name, parameter in parameters.items() if not _is_matrix(name, parameter)]
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _make_muon(policy: Policy, trained: Mapping[str, nn.Parameter], section: OptimizerSection) -> Muon:
    """Muon for the matrices of the layers, and for fused experts, which are stacks of matrices; AdamW for the rest."""
    in_layers = {id(parameter) for layer in decoder_layers(policy.model) for parameter in layer.parameters()}
    matrices = [each for name, each in trained.items() if _is_matrix(name, each) and id(each) in in_layers]
    chosen = {id(parameter) for parameter in matrices}
    if not matrices:
        raise ConfigError("optimizer.type: muon updates matrices of the layers, and none of them is trained; set adamw")
    muon = {"params": matrices, "weight_decay": section.weight_decay, "is_muon": True}
    rest = {name: parameter for name, parameter in trained.items() if id(parameter) not in chosen}
    adamw = [{**group, "is_muon": False} for group in _decay_groups(rest, section)]
    return Muon([muon, *adamw], lr=section.lr, momentum=section.momentum, betas=section.betas, eps=section.eps)


class Muon(torch.optim.Optimizer):
    """See the module's docstring. A group with `is_muon` holds matrices, or stacks of them (experts, rows, columns)."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0, "is_muon": False}
        super().__init__(list(groups), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. A collective when matrices are sharded."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            if group["is_muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update_matrix(parameter, group)
            else:
                self._adamw(group)

    def _update_matrix(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(state["momentum_buffer"], group["momentum"])
        # whole experts are sharded: each rank has its own matrices
        if update.ndim == 3 or not isinstance(update, DTensor):
            direction = orthogonalize(local_of(update))
        else:
            whole = orthogonalize(update.full_tensor())
            own = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)  # sends nothing
            direction = own.to_local()
        rows, scale = local_of(parameter), 0.2 * math.sqrt(max(parameter.shape[-2:]))
        rows.mul_(1 - group["lr"] * group["weight_decay"])
        rows.add_(direction.to(rows.dtype), alpha=-group["lr"] * scale)

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)  # on the device, as the fused update expects
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(update: torch.Tensor) -> torch.Tensor:
    """Approximately U V^T of the singular value decomposition of each matrix, (..., rows, columns): five Newton-Schulz steps
    X <- a X + (b X X^T + c (X X^T)^2) X, which bring singular values to between about 0.7 and 1.2. They multiply small ones by up
    to a^5 = 485, and the rounding of the gradient with them: in bfloat16, elements of the result differ by several percent between
    two processors or numbers of ranks. CPUs therefore compute in float32, which is faster on most of them, too."""
    is_tall = update.shape[-2] > update.shape[-1]
    matrix: torch.Tensor = update.float() if update.device.type == "cpu" else update.bfloat16()
    if is_tall:
        matrix = matrix.mT
    matrix = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = matrix @ matrix.mT
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
    result: torch.Tensor = matrix.mT if is_tall else matrix
    return result
