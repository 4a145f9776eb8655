"""Bases of adapters in 4 bits (NF4 of QLoRA, arXiv 2305.14314), by bitsandbytes. Every rank holds all of the base: FSDP shards only
what is trained. Experts that a model keeps in one tensor are no linear layers, and stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from grpo_async.errors import ConfigError
from grpo_async.utils.extras import needs

_BLOCK = 64  # weights that share a scale


class Linear4Bit(nn.Linear):
    """A frozen linear layer. `weight`: two weights a byte, uint8 [weights / 2, 1]; `absmax`: the scale of each block, float32."""

    weight: nn.Parameter
    absmax: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.whole_shape = (linear.out_features, linear.in_features)
        count = linear.out_features * linear.in_features
        packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("absmax", torch.empty(-(-count // _BLOCK), device="meta"), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        import bitsandbytes

        untyped: Any = bitsandbytes
        output: torch.Tensor = untyped.matmul_4bit(input, self.weight.t(), self._state(input.dtype), bias=self.bias)
        return output

    def whole(self) -> torch.Tensor:
        """The weights that the layer computes with. float32"""
        from bitsandbytes.functional import dequantize_4bit

        weight: torch.Tensor = dequantize_4bit(self.weight, self._state(torch.float32))
        return weight

    def _state(self, dtype: torch.dtype) -> Any:
        from bitsandbytes import functional

        untyped: Any = functional
        code = untyped.get_4bit_type("nf4", device=self.weight.device)
        options = {"shape": torch.Size(self.whole_shape), "blocksize": _BLOCK, "quant_type": "nf4", "dtype": dtype}
        return untyped.QuantState(absmax=self.absmax, code=code, **options)


def use_4_bits(model: Any) -> None:
    """Replace the linear layers of a model on "meta" but the head and the routers of experts. Raises ConfigError."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"model.lora.load_in_4bit: {needs('bitsandbytes')} ({error})") from error
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and not name.endswith(("gate", "router")):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Linear4Bit(module))


def layers_in_4_bits(model: Any) -> Iterator[tuple[str, Linear4Bit]]:
    """The layers under their names without adapters."""
    for name, module in model.named_modules():
        if isinstance(module, Linear4Bit):
            yield name.removesuffix(".base_layer"), module


def quantized(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` and `absmax` of a layer with these weights."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(whole.float().contiguous(), blocksize=_BLOCK, quant_type="nf4")
    return packed, state.absmax
