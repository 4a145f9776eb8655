"""The tensors of a model as its checkpoint has them in memory: tied ones once, adapters merged, buffers that are saved.

A source is gathered from its shards when it is asked for, never before, so no second copy of the model comes to be.

LoRA (arXiv 2106.09685): W' = W + sum over active adapters of scaling x B A, in float32, also where W is kept in bfloat16 (peft
rounds each product to the dtype of the weights).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from grpo_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """scaling x B A of one adapter, B of shape (M, r) and A of shape (r, N), or its transpose (N, M)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    is_transposed: bool

    def add_to(self, weight: torch.Tensor) -> torch.Tensor:
        a, b = _whole(self.a).float(), _whole(self.b).float()
        left, right = (a.T, b.T) if self.is_transposed else (b, a)
        return torch.addmm(weight, left, right, alpha=self.scaling)


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

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def gather(self) -> torch.Tensor:
        """The whole tensor with its adapters, on the device of the shards. A collective: call it on every rank."""
        full = _whole(self.tensor)
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
    for name, parameter in module._parameters.items():
        if parameter is not None:
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
        yield Source(name=source.name, tensor=source.tensor, is_buffer=source.is_buffer, changes=own)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
