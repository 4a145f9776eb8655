"""Attention that keeps the samples of a packed row apart, registered with transformers under two names.

    mask    one sample at a time, plain causal attention: no (R, T, T) mask is ever made. Any device, any dtype.
    varlen  torch.nn.attention.varlen: one kernel for all samples. GPU, 16 bit.

The layout of the samples reaches the layers as the keyword `sample_layout`, the window of a layer as its mask, `CausalMask`. A
model that needs more than this (other masks, biases, sinks) is refused."""

from __future__ import annotations

import inspect
import math
from functools import cached_property
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grpo_async.config.base import AttentionName
from grpo_async.errors import ConfigError
from grpo_async.utils.text import dtype_name

_QUERY_BLOCK = 256  # queries that attend at a time in a window, or soft-capped

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_MAX_HEAD_DIM = 256
# arguments that change the outcome of a family's attention, and that neither function applies
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "alibi", "head_mask", "layer_head_mask")


class CausalMask:
    """Replaces the mask that transformers would make for a layer: causal, within a window of this many tokens (None = all)."""

    def __init__(self, window: int | None) -> None:
        self.window = window


class SampleLayout:
    """Where the samples of one micro-batch are. Counts the layers that used it.

    Worked example, one row [a a a b b - -]: lengths [3, 2, 2], the last one padding.
    """

    def __init__(self, segment_ids: torch.Tensor, *, device: torch.device | None = None) -> None:
        """Read the layout from `segment_ids` (R, T): number of the sample in its row, -1 = padding. Keep it on the CPU: the
        host would wait for a GPU. `device`: where attention runs; None: where `segment_ids` are."""
        self._device = device or segment_ids.device
        rows = segment_ids.cpu()
        changes = torch.ones(rows.shape, dtype=torch.bool)
        changes[:, 1:] = rows[:, 1:] != rows[:, :-1]
        starts = changes.reshape(-1).nonzero()[:, 0]
        stops = torch.cat([starts[1:], torch.tensor([rows.numel()])])
        self.lengths: list[int] = (stops - starts).tolist()  # lengths of samples and of runs of padding, in order
        self.is_padding: list[bool] = (rows.reshape(-1)[starts] < 0).tolist()
        self.max_length = max(self.lengths)
        self._cumulative_lengths = torch.cat([starts, stops[-1:]]).to(torch.int32)
        self.no_padding = torch.ones(rows.shape, dtype=torch.bool, device=self._device)
        """The mask that the model is given, (R, T). Given none, transformers looks for packed samples in the position ids in every
        forward, and the host waits for the device."""
        _LAYOUTS.add(self)
        self.num_uses = 0

    @cached_property
    def cumulative_lengths(self) -> torch.Tensor:
        """The cumulative lengths, on the device that attends, int32. [len(lengths) + 1]"""
        if self._device.type != "cuda":
            return self._cumulative_lengths.to(self._device)
        return self._cumulative_lengths.pin_memory().to(self._device, non_blocking=True)


_LAYOUTS: WeakSet[SampleLayout] = WeakSet()


def _is_of_a_layout(mask: torch.Tensor) -> bool:
    """Whether `mask` is the `no_padding` of a layout in use, or, as some models make it, another view of its memory."""
    memory = mask.untyped_storage().data_ptr()
    return any(layout.no_padding.untyped_storage().data_ptr() == memory for layout in _LAYOUTS)


def choose_attention(
    wanted: Literal["auto", AttentionName], *, device: torch.device, dtype: torch.dtype, config: Any = None
) -> tuple[AttentionName, str]:
    """The attention that `model.attention` selects on this device, and why: a clause for a message or the log. `dtype` is that of
    the forward pass; `config` the model's, if known: some need what varlen lacks."""
    obstacle = _obstacle_to_varlen(device, dtype, config)
    if wanted == "varlen" and obstacle is not None:
        raise ConfigError(f"model.attention: varlen cannot run: {obstacle}; set it to mask, or to auto")
    if wanted == "mask":
        return "mask", "asked for"
    if obstacle is not None:
        return "mask", f"varlen cannot run: {obstacle}"
    return "varlen", "asked for" if wanted == "varlen" else "a GPU and 16 bits"


def _obstacle_to_varlen(device: torch.device, dtype: torch.dtype, config: Any) -> str | None:
    if device.type != "cuda":
        return f"it needs a GPU, and the trainer computes on {device.type}"
    if dtype not in _VARLEN_DTYPES:
        return f"it needs bfloat16 or float16, and model.compute_dtype is {dtype_name(dtype)}"
    if config is None:
        return None
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return "it does not support soft-capping, and the model sets `attn_logit_softcapping`"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim > _VARLEN_MAX_HEAD_DIM:
        return f"it supports heads of at most {_VARLEN_MAX_HEAD_DIM} dimensions, and the model's have {head_dim}"
    return None


def use_attention(model: Any, name: AttentionName) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    full_name = f"grpo_async_{name}"
    AttentionInterface.register(full_name, _mask_attention if name == "mask" else _varlen_attention)
    AttentionMaskInterface.register(full_name, _make_mask)
    model.set_attn_implementation(full_name)
    if model.config.get_text_config()._attn_implementation != full_name:
        raise ConfigError(
            f"model.path: the attention of {type(model).__name__} cannot be given the boundaries of packed samples; "
            "this family cannot be trained"
        )


def _make_mask(**arguments: Any) -> CausalMask:
    # vmap: the model changes the mask by its own function; bidirectional: attention to later tokens
    if arguments.get("use_vmap") or "allow_is_bidirectional_skip" in arguments:
        raise ConfigError("model.path: the model's attention is not causal everywhere; this family cannot be trained")
    mask = arguments.get("attention_mask")
    if mask is not None and not _is_of_a_layout(mask):
        raise ValueError("a padded batch is described by sample_layout, not by attention_mask")
    return CausalMask(arguments.get("local_size"))


# both use the layout's Python numbers, which change with every batch: torch.compile would recompile for each
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask_attention(
    module: nn.Module,
    query: torch.Tensor,  # (R, H, T, D)
    key: torch.Tensor,  # (R, H_kv, T, D)
    value: torch.Tensor,  # (R, H_kv, T, D)
    attention_mask: CausalMask | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    layout, scale, window, softcap = _settings(module, query, attention_mask, arguments)
    rows, heads, tokens, _ = query.shape
    # one long row; split and cat, because the gradient of a slice is as large as the tensor that was sliced
    flat = [states.transpose(0, 1).reshape(1, states.shape[1], rows * tokens, -1) for states in (query, key, value)]
    pieces = []
    parts = zip(*(torch.split(states, layout.lengths, dim=2) for states in flat), strict=True)
    for (q, k, v), is_padding in zip(parts, layout.is_padding, strict=True):
        k, v = _repeated(k, heads), _repeated(v, heads)
        if is_padding:
            # each of its tokens sees itself only; q and k get gradients (of zeros), as parameters must
            q, k, v = (states.transpose(0, 2) for states in (q, k, v))
            pieces.append(_attend(q, k, v, scale, None, softcap).transpose(0, 2))
        else:
            pieces.append(_attend(q, k, v, scale, window, softcap))
    output = torch.cat(pieces, dim=2)  # (1, H, R x T, D)
    return output.transpose(1, 2).reshape(rows, tokens, heads, -1), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls for `varlen`. Shapes as above."""
    from torch.nn.attention.varlen import varlen_attn

    layout, scale, window, softcap = _settings(module, query, attention_mask, arguments)
    if softcap is not None:
        raise ConfigError(
            "model.attention: varlen does not support soft-capping, and the model uses it; set it to mask"
        )
    rows, heads, tokens, _ = query.shape
    options: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:
        key, value = _repeated(key, heads), _repeated(value, heads)
    q, k, v = (states.transpose(1, 2).reshape(rows * tokens, states.shape[1], -1) for states in (query, key, value))
    ends = layout.cumulative_lengths
    output: Any = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        layout.max_length,
        layout.max_length,
        scale=scale,
        # keys before and after the query that it sees, apart from its own; -1 = all
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return output.reshape(rows, tokens, heads, -1), None


def _settings(
    module: nn.Module, query: torch.Tensor, attention_mask: CausalMask | None, arguments: dict[str, Any]
) -> tuple[SampleLayout, float, int | None, float | None]:
    """Layout, scale of the scores, window and softcap of this layer; refuses arguments that would be silently ignored."""
    kind = type(module).__name__
    unsupported = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if not isinstance(attention_mask, CausalMask):
        unsupported.append("mask")
    if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
        unsupported.append("attention to later tokens")
    if arguments.get("dropout"):
        unsupported.append("dropout")
    if unsupported:
        raise ConfigError(
            f"model.path: the trainer's attention does not apply the {', '.join(unsupported)} of {kind}; "
            "this family cannot be trained"
        )
    assert isinstance(attention_mask, CausalMask)
    layout: SampleLayout | None = arguments.get("sample_layout")
    if layout is None:  # the model is called directly, not by Policy (which checks num_uses): one sample per row
        layout = SampleLayout(torch.zeros(query.shape[0], query.shape[2], dtype=torch.int64, device=query.device))
    layout.num_uses += 1
    scale = arguments.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return layout, scale, attention_mask.window, arguments.get("softcap")


def _repeated(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads of keys or values for grouped queries. (B, H_kv, L, D) -> (B, H, L, D)"""
    batch, kv_heads, length, width = states.shape
    if kv_heads == heads:
        return states
    grouped = states[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, width)
    return grouped.reshape(batch, heads, length, width)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Causal attention inside each of B samples, (B, H, L, D) each. A window of W: a token sees itself and the W - 1 before it."""
    length = q.shape[2]
    window = None if window is None or window >= length else window
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    outputs = []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        first = 0 if window is None else max(0, begin - window + 1)  # first key that the block sees
        distance = (
            torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)[None, :]
        )
        visible = (distance >= 0) & (distance < (math.inf if window is None else window))  # (queries, keys)
        block = (q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end], visible)
        if softcap is None:
            outputs.append(F.scaled_dot_product_attention(*block[:3], attn_mask=visible, scale=scale))
        elif torch.is_grad_enabled():
            # scores are computed again in the backward pass, not held for every block
            outputs.append(checkpoint(_softcapped, *block, scale, softcap, use_reentrant=False))
        else:
            outputs.append(_softcapped(*block, scale, softcap))
    return torch.cat(outputs, dim=2)


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """softmax(softcap x tanh(q k / softcap)) v (Gemma 2, arXiv 2408.00118)."""
    scores = torch.tanh((q @ k.transpose(-2, -1)) * (scale / softcap)) * softcap
    scores = scores.float().masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
