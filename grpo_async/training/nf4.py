"""Frozen linear layers in 4 bits (QLoRA, arXiv 2305.14314), in a form that FSDP can shard by rows.

A row of the weight is a row of one uint8 parameter: two codes in a byte, then the largest magnitudes of its blocks of 64, in
float32. No block lies in two rows, so each rank quantizes its own rows, to what one rank would get. Codes are those of
bitsandbytes.

Worked example: a weight (10, 128) in float32 is 5120 bytes; packed (10, 64 + 2 x 4) = 720 bytes, 4.5 bits an element.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from grpo_async.errors import ConfigError
from grpo_async.utils.extras import needs

BLOCK = 64
"""Elements that share one magnitude."""


class Nf4Linear(nn.Linear):
    """y = x W^T + b with W kept as `qweight` (the name under which peft looks for such a parameter), (out_features,
    in_features / 2 + in_features / 16) uint8. W is computed for each pass, in the dtype of x, and gets no
    gradient. Made on the device "meta"; `weight` is None."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.empty(self.out_features, packed_width(self.in_features), dtype=torch.uint8, device="meta")
        self.qweight = nn.Parameter(packed, requires_grad=False)
        self.register_parameter("weight", None)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(input, self.qweight, self.in_features)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


def packed_width(in_features: int) -> int:
    """Bytes of a packed row: in_features / 2 + 4 x in_features / 64."""
    return in_features // 2 + 4 * (in_features // BLOCK)


def quantize_layers(model: Any, *, keep: Collection[str] = ()) -> None:
    """Replace every linear layer of `model` (on "meta") but the head and those in the modules `keep`.

    Raises:
        ConfigError: bitsandbytes is missing, or a layer's rows are no multiple of 64.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"model.lora.quantization: nf4 {needs('bitsandbytes')}")
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        is_kept = any(f"{name}.".startswith(f"{each}.") for each in keep)
        if not isinstance(module, nn.Linear) or module is head or is_kept:
            continue
        if module.in_features % BLOCK:
            raise ConfigError(
                f"model.lora.quantization: nf4 needs rows of a multiple of {BLOCK}, {name} has {module.in_features}; leave it out"
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Nf4Linear(module))


def quantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """(R, in_features) of any float dtype -> (R, packed_width) uint8."""
    count, width = rows.shape
    if not count:
        return torch.empty(0, packed_width(width), dtype=torch.uint8, device=rows.device)
    codes, state = bitsandbytes_functions().quantize_4bit(rows.float().contiguous(), blocksize=BLOCK, quant_type="nf4")
    magnitudes = state.absmax.reshape(count, width // BLOCK).contiguous().view(torch.uint8)
    return torch.cat([codes.reshape(count, width // 2), magnitudes], dim=1)


def dequantize_rows(packed: torch.Tensor, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """(R, packed_width) uint8 -> (R, in_features)."""
    functions = bitsandbytes_functions()
    packed = packed.to(torch.uint8)  # FSDP of torch 2.11 gathers bytes in the compute dtype, in which all 256 are exact
    count = packed.shape[0]
    if not count:
        return torch.empty(0, in_features, dtype=dtype, device=packed.device)
    codes = packed[:, : in_features // 2].reshape(-1, 1)
    magnitudes = packed[:, in_features // 2 :].contiguous().view(torch.float32).reshape(-1)
    state = functions.QuantState(
        absmax=magnitudes,
        shape=torch.Size((count, in_features)),
        code=functions.get_4bit_type("nf4", device=packed.device, blocksize=BLOCK),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    rows: torch.Tensor = functions.dequantize_4bit(codes, state)
    return rows


def bitsandbytes_functions() -> Any:
    """The module `bitsandbytes.functional`, imported when it is first needed: it takes a second."""
    return importlib.import_module("bitsandbytes.functional")


class _Product(torch.autograd.Function):
    """x W^T, keeping the packed weight for the backward pass and not W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, in_features: int) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.in_features = in_features
        return x @ dequantize_rows(packed, in_features, x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ dequantize_rows(packed, ctx.in_features, gradient.dtype), None, None
