"""Muon for matrices and AdamW for everything else, as one optimizer.

    M_t = mu M_{t-1} + (1 - mu) G_t           momentum
    U_t = (1 - mu) G_t + mu M_t               Nesterov
    O_t = NewtonSchulz_5(U_t) ~ U V^T         of the singular value decomposition U S V^T of U_t
    W_t = (1 - lr wd) W_{t-1} - lr 0.2 sqrt(max(rows, columns)) O_t

Muon (K. Jordan, 2024), with the scale of arXiv 2502.16982, which makes the update as large as AdamW's: one learning rate serves
both.

Sharded matrices: the momentum stays sharded, O_t is computed of the whole U_t on every rank (one all-gather of a matrix at a time),
and each rank takes its rows. The result does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from grpo_async.training.sources import rows_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


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
                        self._move_matrix(parameter, group)
            else:
                self._adamw(group)

    def _move_matrix(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(state["momentum_buffer"], group["momentum"])
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        rows, offset = rows_of(parameter)
        if whole.ndim == 3:  # experts are sharded whole
            whole, offset = whole[offset : offset + rows.shape[0]], 0
        direction = orthogonalise(whole)[offset : offset + rows.shape[0]]
        scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        rows.mul_(1 - group["lr"] * group["weight_decay"])
        rows.add_(direction.to(rows.dtype), alpha=-group["lr"] * scale)

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
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
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """About U V^T of the singular value decomposition of each matrix, (..., rows, columns): five Newton-Schulz steps X <- a X +
    (b X X^T + c (X X^T)^2) X, in bfloat16, which leave singular values between about 0.7 and 1.2."""
    is_tall = update.shape[-2] > update.shape[-1]
    matrix: torch.Tensor = update.bfloat16()
    if is_tall:
        matrix = matrix.mT
    matrix = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = matrix @ matrix.mT
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
    result: torch.Tensor = matrix.mT if is_tall else matrix
    return result
