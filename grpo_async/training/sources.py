"""The tensors of a model as its checkpoint has them in memory: tied ones once, adapters merged, buffers that are saved.

A source is gathered from its shards when it is asked for, never before, so no second copy of the model comes to be.

LoRA (arXiv 2106.09685): W' = W + sum over active adapters of scaling x B A, in float32, also where W is kept in bfloat16 (peft
rounds each product to the dtype of the weights).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from grpo_async.errors import ConfigError
from grpo_async.training.nf4 import Nf4Linear, dequantize_rows, quantize_rows

_ROWS = 16_384  # of a tensor that are copied or quantized at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """scaling x B A of one adapter, B of shape (M, r) and A of shape (r, N), or its transpose (N, M)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    is_transposed: bool

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(left, right), float32, whole, with scaling x B A (or its transpose) = left @ right. A collective."""
        a, b = _whole(self.a).float(), _whole(self.b).float() * self.scaling
        return (a.T, b.T) if self.is_transposed else (b, a)

    def add_to(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(weight, *self.factors())


@dataclass(frozen=True, slots=True, kw_only=True)
class Summand:
    """scaling x b: the bias of an adapter."""

    b: torch.Tensor
    scaling: float

    def add_to(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scaling * _whole(self.b).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A parameter or buffer under the name it has without adapters."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool = False
    changes: list[Product | Summand] = field(default_factory=list)
    packed_columns: int | None = None
    """in_features of a weight that `tensor` holds in 4 bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.tensor.shape)
        return shape if self.packed_columns is None else (shape[0], self.packed_columns)

    @property
    def saved_dtype(self) -> torch.dtype:
        """dtype in which an export has it: bfloat16 for what is kept in 4 bits."""
        return self.tensor.dtype if self.packed_columns is None else torch.bfloat16

    def local_rows(self) -> tuple[torch.Tensor, int]:
        """This rank's entries of the first dimension, as they are kept, and the number of the first one."""
        return rows_of(self.tensor)

    def fill(self, read: Callable[[int, int], torch.Tensor]) -> None:
        """Copy this rank's rows from `read(start, stop)`, which gives those entries of the whole tensor."""
        rows, offset = self.local_rows()
        if not rows.ndim:
            rows.copy_(read(0, 1))
            return
        for start in range(0, rows.shape[0], _ROWS):
            stop = min(start + _ROWS, rows.shape[0])
            values = read(offset + start, offset + stop)
            if self.packed_columns is not None:
                values = quantize_rows(values.to(rows.device))
            rows[start:stop].copy_(values)

    def gather(self) -> torch.Tensor:
        """The whole tensor with its adapters, on the device of the shards. A collective: call it on every rank."""
        full = _whole(self.tensor)
        if self.packed_columns is not None:
            full = dequantize_rows(full, self.packed_columns, torch.float32)
        if not self.changes:
            return full
        merged = full.float()
        for change in self.changes:
            merged = change.add_to(merged)
        return merged


def list_sources(model: Any) -> list[Source]:
    """Every tensor of the checkpoint of `model`, a Hugging Face model or a peft model around one.

    Raises:
        ConfigError: adapters of a kind that cannot be merged one weight at a time.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ignored = set(getattr(base, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(base, "all_tied_weights_keys", None) or ())  # names that a checkpoint leaves out
    by_tensor: dict[int, list[Source]] = {}
    for source in _walk(base, ""):
        if source.name not in ignored:
            by_tensor.setdefault(id(source.tensor), []).append(source)
    sources = []
    for shared in by_tensor.values():
        if len(shared) > 1 and any(source.changes for source in shared):
            names = " and ".join(source.name for source in shared)
            raise ConfigError(
                f"LoRA: {names} are one tied weight, an adapter on one of them would untie it; take it from the targets"
            )
        sources.append(next((source for source in shared if source.name not in tied), shared[0]))
    return sources


def _walk(module: nn.Module, prefix: str) -> Iterator[Source]:
    """Own tensors, then those of the children, without the wrappers that peft puts in between."""
    if "peft" in sys.modules:
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        if isinstance(module, LoraLayer):
            yield from _walk_lora(module, prefix)
            return
        if isinstance(module, ModulesToSaveWrapper):
            active = [name for name in module.active_adapters if name in module.modules_to_save]
            used = (
                module.modules_to_save[active[0]] if active and not module.disable_adapters else module.original_module
            )
            yield from _walk(used, prefix)
            return
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise ConfigError(
                f"adapters of the kind {type(module).__name__} ({prefix}) cannot be sent to a server; use LoRA"
            )
    dot = f"{prefix}." if prefix else ""
    if isinstance(module, Nf4Linear):
        yield Source(name=f"{dot}weight", tensor=module.qweight, packed_columns=module.in_features)
    for name, parameter in module._parameters.items():
        if parameter is not None and not (isinstance(module, Nf4Linear) and name == "qweight"):
            yield Source(name=f"{dot}{name}", tensor=parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Source(name=f"{dot}{name}", tensor=buffer, is_buffer=True)
    for name, child in module.named_children():
        yield from _walk(child, f"{dot}{name}")


def _walk_lora(layer: nn.Module, prefix: str) -> Iterator[Source]:
    """The base layer's tensors with the products of the adapters that are active and not merged yet."""
    from peft.tuners.lora import Embedding, Linear

    module: Any = layer
    changes: dict[str, list[Product | Summand]] = {"weight": [], "bias": []}
    for adapter in [] if module.disable_adapters else module.active_adapters:
        if adapter in module.merged_adapters:
            continue
        if adapter in module.lora_variant:
            kind = type(module.lora_variant[adapter]).__name__
            raise ConfigError(f"LoRA: {prefix} is of the variant {kind}; only plain LoRA can be sent to a server")
        if not isinstance(layer, Linear | Embedding):
            raise ConfigError(
                f"LoRA: {prefix} is a {type(module).__name__}; only linear layers and embeddings can be sent to a server"
            )
        if adapter in module.lora_A:
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight  # (r, in), (out, r)
            product = Product(a=a, b=b, scaling=module.scaling[adapter], is_transposed=bool(module.fan_in_fan_out))
            changes["weight"].append(product)
            if module.lora_bias[adapter]:
                changes["bias"].append(Summand(b=module.lora_B[adapter].bias, scaling=module.scaling[adapter]))
        elif adapter in module.lora_embedding_A:
            a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]  # (r, vocabulary), (width, r)
            changes["weight"].append(Product(a=a, b=b, scaling=module.scaling[adapter], is_transposed=True))
    for source in _walk(module.get_base_layer(), prefix):
        own = changes.get(source.name.removeprefix(f"{prefix}."), [])
        yield replace(source, changes=own)


def rows_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's entries of the first dimension of a parameter, in its own memory, and the number of the first one.

    Worked example: (5, 8) over 2 ranks -> (3, 8) and 0 on rank 0, (2, 8) and 3 on rank 1.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, 0
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if tuple(shape[1:]) != tuple(tensor.shape[1:]) or tuple(local.shape) != tuple(shape):
        raise ValueError(f"a tensor is sharded by {tensor.placements}, only its first dimension may be")
    return local, offset[0] if offset else 0


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
