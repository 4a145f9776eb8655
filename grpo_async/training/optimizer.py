"""The optimizer of a policy, on the shards of FSDP: AdamW, AdamW with moments in 8 bits, or Muon; and its learning rate. Weight
decay applies to matrices, not to biases and norms.

(torch.optim.Muon does not support stacks of matrices, such as fused experts, and cannot share an optimizer with AdamW. torchao's
AdamW8bit compiles its step, on a CPU for half a minute, and its state is of a tensor class of its own.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import zeros as distributed_zeros
from torch.nn import functional as F
from torch.optim.adamw import adamw

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import OptimizerSection
from grpo_async.errors import ConfigError
from grpo_async.training.model import Policy, decoder_layers
from grpo_async.training.parameters import local_of

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = 256  # elements that share a scale
_AT_A_TIME = 2**24  # elements whose moments are in 32 bits at the same time
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
        settings: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
        if section.type == "adamw_8bit":
            optimizer = AdamW8bit(groups, settings)
        else:
            optimizer = torch.optim.AdamW(groups, fused=True, **settings)
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


def _adamw(states: dict[torch.Tensor, Any], parameters: Iterable[torch.Tensor], group: Mapping[str, Any]) -> None:
    """One fused update of AdamW of those parameters that have a gradient."""
    updated = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in updated if parameter.grad is not None]
    for parameter in updated:
        state = states[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)  # on the device, as the fused update expects
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
    adamw(
        updated,
        gradients,
        [states[parameter]["exp_avg"] for parameter in updated],
        [states[parameter]["exp_avg_sq"] for parameter in updated],
        [],
        [states[parameter]["step"] for parameter in updated],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments of matrices have 8 bits (arXiv 2110.02861): each is one of 256 levels times the largest of its block, 256
    neighbors in a row. Codes and scales are sharded as the parameter is, by rows, so that a checkpoint loads on any number of
    ranks. Vectors keep moments of 32 bits."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("AdamW8bit takes no closure")
        for group in self.param_groups:
            _adamw(self.state, [parameter for parameter in group["params"] if parameter.ndim < 2], group)
            for parameter in group["params"]:
                if parameter.ndim >= 2 and parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # on the CPU, which reads it
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{name}_scale"] = _scales_of(parameter)
        state["step"] += 1
        step, (first, second) = int(state["step"]), group["betas"]
        rate = group["lr"] / (1 - first**step)
        tensors = [local_of(each) for each in (parameter, parameter.grad, *(state[name] for name in _MOMENTS))]
        scales = [local_of(state[f"{name}_scale"]) for name in _MOMENTS]
        rows = max(1, _AT_A_TIME // max(1, math.prod(parameter.shape[1:])))
        parts = ([part.flatten(1) for part in torch.split(each, rows)] for each in (*tensors, *scales))
        for weight, gradient, codes, square_codes, scale, square_scale in zip(*parts, strict=True):
            if not weight.numel():
                continue
            exact = gradient.float()
            moment = _read_levels(codes, scale, is_signed=True).lerp_(exact, 1 - first)
            square = _read_levels(square_codes, square_scale, is_signed=False).mul_(second)
            square.addcmul_(exact, exact, value=1 - second)
            _write_levels(moment, codes, scale, is_signed=True)
            _write_levels(square, square_codes, square_scale, is_signed=False)
            divisor = square.div_(1 - second**step).sqrt_().add_(group["eps"])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(moment.div_(divisor).mul_(rate).to(weight.dtype))


def _scales_of(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros, one for each block of a row: (rows, blocks), sharded as the parameter is."""
    shape = len(parameter), -(-math.prod(parameter.shape[1:]) // _BLOCK)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    sharded: torch.Tensor = distributed_zeros(
        *shape, device_mesh=parameter.device_mesh, placements=parameter.placements
    )
    return sharded


@cache
def _levels(device: torch.device, *, is_signed: bool) -> torch.Tensor:
    """The 256 values of dynamic tree quantization, in order: 0, 1, and for each exponent e from 0 to 6 10^-e times the middles of
    2^(6 - e) equal parts (unsigned: 2^(7 - e)) of [0.1, 1], with either sign."""
    levels = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (6 + (not is_signed) - exponent) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0**-exponent
        levels += [middles, -middles] if is_signed else [middles]
    ordered: torch.Tensor = torch.cat(levels).sort().values
    return ordered.to(device)


def _read_levels(codes: torch.Tensor, scale: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    """(rows, columns) uint8, (rows, blocks) -> (rows, columns) float32"""
    values = _levels(codes.device, is_signed=is_signed)[codes.int()]
    scaled: torch.Tensor = values * scale.repeat_interleave(_BLOCK, dim=1)[:, : codes.shape[1]]
    return scaled


def _write_levels(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *, is_signed: bool) -> None:
    """Round `values` to the nearest levels, in place of `codes` and `scale`. A square above 0 stays above it: the update divides by
    its root."""
    rows, columns = values.shape
    blocks = F.pad(values, (0, -columns % _BLOCK)).view(rows, -1, _BLOCK)
    torch.amax(blocks.abs(), dim=-1, out=scale)
    relative = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    levels = _levels(values.device, is_signed=is_signed)
    nearest = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    if not is_signed:
        nearest = torch.where(relative > 0, nearest.clamp(min=1), nearest)
    codes.copy_(nearest.flatten(1)[:, :columns])


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
                _adamw(self.state, group["params"], group)

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


def lr_factors(config: ExperimentConfig) -> Callable[[int], float]:
    """The factor on `optimizer.lr` by 0-based step; a function of the step alone, so a resume needs no state of it.

    Warmup: (step + 1) / warmup_steps. (transformers begins at 0, which wastes the first step.) Then the schedule begins, and
    ends at the run's last step. With 10 steps, 2 of warmup and `linear`: 0.5, 1, 1, 0.875, 0.75, ..., 0.125."""
    warmup = config.warmup_steps
    after = _after_warmup(config)
    return lambda step: (step + 1) / warmup if step < warmup else after(step - warmup)


def _after_warmup(config: ExperimentConfig) -> Callable[[int], float]:
    optimizer, name = config.optimizer, config.optimizer.schedule
    floor = optimizer.min_lr_ratio
    defaults: dict[str, tuple[str, dict[str, float | None]]] = {
        "linear": ("polynomial", {"lr_end": floor * optimizer.lr}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": floor}),
        "polynomial": (name, {"lr_end": floor * optimizer.lr}),
        "warmup_stable_decay": (name, {"min_lr_ratio": floor}),
        "inverse_sqrt": (name, {"timescale": config.warmup_steps or None}),
    }
    scheduler_name, arguments = defaults.get(name, (name, {}))
    arguments = {**arguments, **optimizer.schedule_kwargs}
    if name == "constant" and arguments:
        raise ConfigError("optimizer.schedule_kwargs: constant takes none; set optimizer.schedule, or leave them out")
    if name == "constant" or arguments.get("lr_end") == optimizer.lr:  # which transformers refuses
        return lambda step: 1.0
    from transformers.optimization import get_scheduler

    dummy: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optimizer.lr)
    try:
        scheduler = get_scheduler(
            scheduler_name,
            dummy,
            num_warmup_steps=0,
            num_training_steps=max(1, config.num_steps - config.warmup_steps),
            scheduler_specific_kwargs=arguments,
        )
        factor: Callable[[int], float] = scheduler.lr_lambdas[0]
        factor(0)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.schedule_kwargs: {name} cannot be created with {optimizer.schedule_kwargs}: {error}"
        ) from error
    return factor
