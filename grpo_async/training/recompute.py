"""Activation checkpointing: what a decoder layer computed is thrown away and computed again in the backward pass.

Applied inside FSDP's hooks, around the layer's own forward, so that names of parameters stay as they are and no weight is gathered
twice. Gradients are those without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT_NAMES = (
    ("aten", "mm"),
    ("aten", "addmm"),
    ("aten", "bmm"),
    ("aten", "baddbmm"),
    ("aten", "_grouped_mm"),
    ("aten", "_scaled_dot_product_flash_attention"),
    ("aten", "_scaled_dot_product_flash_attention_for_cpu"),
    ("aten", "_scaled_dot_product_efficient_attention"),
    ("aten", "_scaled_dot_product_cudnn_attention"),
    ("aten", "_flash_attention_forward"),
    ("aten", "_efficient_attention_forward"),
    ("torch_attn", "_varlen_attn"),
)
"""Operators whose results `selective` keeps: matrix products and attention, nearly all of the time of a layer."""


def recompute_activations(model: Any, mode: Literal["none", "selective", "full"]) -> None:
    """Make every decoder layer of `model` recompute. Call it before the layers are compiled and sharded.

    Args:
        mode: full: everything but a layer's input. selective: everything but matrix products and attention.
    """
    if mode == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in decoder_layers(model):
        layer.forward = partial(_recomputed, layer.forward, settings)


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The decoder layers of a Hugging Face causal LM: the longest of its outermost ModuleLists."""
    lists: list[nn.ModuleList] = []
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        if isinstance(module, nn.ModuleList):
            lists.append(module)
        else:
            pending.extend(module.children())
    return cast(Sequence[nn.Module], max(lists, key=len)) if lists else []


def _recomputed(forward: Callable[..., Any], settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **settings, **kwargs)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


def _kept() -> frozenset[Any]:
    global _operators
    if _operators is None:
        found = (getattr(getattr(torch.ops, library), name, None) for library, name in _KEPT_NAMES)
        _operators = frozenset(packet.default for packet in found if packet is not None)
    return _operators


_operators: frozenset[Any] | None = None
