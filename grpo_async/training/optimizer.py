"""The optimizer of a policy: AdamW, AdamW with moments of 8 bits, or Muon. It moves what requires a gradient.

Matrices are decayed, biases and norms are not. Each kind works on the shards of FSDP and gives on any number of ranks
what one rank would give; its state is made of tensors that torch's distributed checkpoint can reshard. (torch.optim.Muon takes
no stacks of matrices, such as fused experts, and the states of bitsandbytes' and torchao's optimizers are not resharded by rows:
so both are here.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from grpo_async.config.model_sections import OptimizerSection
from grpo_async.errors import ConfigError
from grpo_async.training.model import Policy, decoder_layers
from grpo_async.training.nf4 import bitsandbytes_functions
from grpo_async.training.parameters import local_of, rows_of
from grpo_async.utils.extras import needs

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_BLOCKS = (256, 128, 64)
_MIN_QUANTIZED = 4096
"""Parameters of fewer elements keep float32 moments."""


def make_optimizer(policy: Policy, section: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.type` names, with the state of every parameter: so the first step takes the memory that all
    take, and checkpoints have the state of parameters that never get a gradient. Every group's `lr` is set before each step.
    A collective (Muon's update is one).

    Raises:
        ConfigError: what it needs is not installed, or there is nothing for it to do.
    """
    optimizer = _make(policy, section)
    _begin_state(optimizer)
    return optimizer


def _make(policy: Policy, section: OptimizerSection) -> torch.optim.Optimizer:
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    match section.type:
        case "adamw":
            groups = _decay_groups(trained, section)
            return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
        case "adamw_8bit":
            if find_spec("bitsandbytes") is None:
                raise ConfigError(f"optimizer.type: adamw_8bit {needs('bitsandbytes')}; or set adamw")
            groups = _decay_groups(trained, section)
            return AdamW8bit(groups, lr=section.lr, betas=section.betas, eps=section.eps)
        case "muon":
            return _make_muon(policy, trained, section)


def _begin_state(optimizer: torch.optim.Optimizer) -> None:
    """The state that the first update of each parameter begins with. No weight moves."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # what decays weights is multiplied by it
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()  # that was none: bias correction begins with the first gradient


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
        raise ConfigError("optimizer.type: muon updates matrices of the layers, and none of them is trained; set adamw")
    muon = {"params": matrices, "weight_decay": section.weight_decay, "is_muon": True}
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
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
        direction = orthogonalize(whole)[offset : offset + rows.shape[0]]
        scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        rows.mul_(1 - group["lr"] * group["weight_decay"])
        rows.add_(direction.to(rows.dtype), alpha=-group["lr"] * scale)

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)  # where the fused update wants it
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


class AdamW8bit(torch.optim.Optimizer):
    """See the module's docstring. State of a quantized parameter: step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; no rank waits for another."""
        if closure is not None:
            raise ValueError("AdamW8bit does not support a closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's, but values keep their own dtypes: torch casts them to the parameter's, which may be bfloat16."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        block = block_size(parameter)
        if not state:
            _begin(state, parameter, block)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        weight, gradient = local_of(parameter), local_of(parameter.grad).float()
        if not weight.numel():
            return
        first = _read(state, "exp_avg", block, signed=True)
        second = _read(state, "exp_avg_sq", block, signed=False)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.add_((first / denominator).to(weight.dtype), alpha=-group["lr"] / (1 - beta1**step))
        _write(state, "exp_avg", first, block, signed=True)
        _write(state, "exp_avg_sq", second, block, signed=False)


def block_size(parameter: torch.Tensor) -> int:
    """Elements that share a magnitude: the largest of 256, 128 and 64 that divides the parameter's rows; 0 = float32 moments."""
    if parameter.ndim < 2 or parameter.numel() < _MIN_QUANTIZED:
        return 0
    return next((block for block in _BLOCKS if parameter.shape[-1] % block == 0), 0)


def _begin(state: dict[str, Any], parameter: torch.Tensor, block: int) -> None:
    state["step"] = torch.tensor(0.0)
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        if not block:
            state[key] = torch.zeros_like(parameter, dtype=torch.float32)
            continue
        zero = int(_codes(parameter.device, signed=signed).abs().argmin())
        state[key] = torch.full_like(parameter, zero, dtype=torch.uint8)
        shape = (*parameter.shape[:-1], parameter.shape[-1] // block)
        state[f"{key}_scale"] = _zeros_like_rows(parameter, shape)


def _zeros_like_rows(parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros of `shape`, sharded by rows as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    local = torch.zeros((*parameter.to_local().shape[:-1], shape[-1]), device=parameter.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    sharded: torch.Tensor = DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return sharded


def _read(state: dict[str, Any], key: str, block: int, *, signed: bool) -> torch.Tensor:
    """A moment in float32, as far as this rank has it."""
    values = local_of(state[key])
    if not block:
        return values
    scale = local_of(state[f"{key}_scale"]).reshape(-1)
    code = _codes(values.device, signed=signed)
    moment: torch.Tensor = bitsandbytes_functions().dequantize_blockwise(
        values.contiguous(), absmax=scale, code=code, blocksize=block
    )
    return moment


def _write(state: dict[str, Any], key: str, moment: torch.Tensor, block: int, *, signed: bool) -> None:
    if not block:
        return  # float32 moments were changed in place
    values, scale = local_of(state[key]), local_of(state[f"{key}_scale"])
    codes, rest = bitsandbytes_functions().quantize_blockwise(
        moment.contiguous(), code=_codes(values.device, signed=signed), blocksize=block
    )
    values.copy_(codes.reshape(values.shape))
    scale.copy_(rest.absmax.reshape(scale.shape))


def _codes(device: torch.device, *, signed: bool) -> torch.Tensor:
    """The 256 values in [-1, 1] or [0, 1] that a code stands for."""
    key = (device, signed)
    if key not in _maps:
        _maps[key] = bitsandbytes_functions().create_dynamic_map(signed=signed).to(device)
    return _maps[key]


_maps: dict[tuple[torch.device, bool], torch.Tensor] = {}
