"""AdamW (arXiv 1711.05101) with moments of 8 bits each (block-wise quantization, arXiv 2110.02861; codes of bitsandbytes).

A moment is a uint8 tensor of the parameter's shape and one float32 magnitude for each block of a row. No block lies in two rows, so
both are sharded by rows like the parameter, and a checkpoint of them can be divided anew. The update itself is computed in float32,
one parameter at a time. Small parameters, and those whose rows cannot be cut into blocks, keep float32 moments.

Worked example: a weight (1024, 768): blocks of 256; 2 x (1024 x 768 + 4 x 1024 x 3) bytes, 2.03 an element instead of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from grpo_async.training.nf4 import bitsandbytes_functions

_BLOCKS = (256, 128, 64)
_SMALLEST = 4096
"""Parameters of fewer elements keep float32 moments."""


class AdamW8bit(torch.optim.Optimizer):
    """See the module's docstring. State of a quantized parameter: step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; no rank waits for another."""
        if closure is not None:
            raise ValueError("AdamW8bit takes no closure")
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
        weight, gradient = _local(parameter), _local(parameter.grad).float()
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
    if parameter.ndim < 2 or parameter.numel() < _SMALLEST:
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
    values = _local(state[key])
    if not block:
        return values
    scale = _local(state[f"{key}_scale"]).reshape(-1)
    code = _codes(values.device, signed=signed)
    moment: torch.Tensor = bitsandbytes_functions().dequantize_blockwise(
        values.contiguous(), absmax=scale, code=code, blocksize=block
    )
    return moment


def _write(state: dict[str, Any], key: str, moment: torch.Tensor, block: int, *, signed: bool) -> None:
    if not block:
        return  # float32 moments were changed in place
    values, scale = _local(state[key]), _local(state[f"{key}_scale"])
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


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
