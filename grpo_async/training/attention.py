"""Attention that keeps the samples of a packed row apart; registered with transformers under two names of ours.

    mask    a sample at a time, plain causal attention: no (R, T, T) mask is ever made. Any device, any dtype.
    varlen  torch.nn.attention.varlen: one kernel for all samples. GPU, 16 bit.

Both give what the model gives for every sample alone. Padding attends to nothing of a sample. The layout of the samples reaches
the layers as the keyword `sample_layout`, which transformers hands through, and the window of a layer as its mask, `CausalMask`.
Samples whose prompt stands with another sample (batching.prompts) attend to it there: `mask` only. Of these nothing is held for the
backward pass but what was given. What a model needs beyond this (other masks, biases, sinks) is refused, never left out.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grpo_async.batching.pack import Continuation
from grpo_async.errors import ConfigError

_QUERY_BLOCK = 256  # queries that attend at a time in a window, soft-capped, or to earlier keys

AttentionName = Literal["mask", "varlen"]

_MIN_FILLED = 0.75  # of the longest sample: as long are those that it attends together with
_MAX_STRETCH_KEYS = 8192  # of samples that attend together, their copies of the prompt included
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_MAX_HEAD_DIM = 256
# what a model family may hand to its attention that changes the outcome and that neither function applies
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "alibi", "head_mask", "layer_head_mask")


class CausalMask:
    """Stands for the mask that transformers would make for a layer: causal, in a window of so many tokens (None = all)."""

    def __init__(self, window: int | None) -> None:
        self.window = window


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbours that attend in one call: a sample, a stretch of padding, or samples that go on from one prompt."""

    lengths: tuple[int, ...]
    """Of its samples. Several have one prompt and are about as long as the longest of them."""
    is_padding: bool
    prompt: tuple[int, int] | None = None
    """Number of the stretch that begins with the prompt, and tokens of the prompt; None: all that is seen is here."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class SampleLayout:
    """Where the samples of one micro-batch lie. Counts the layers that used it.

    Worked example, one row [a a a b b - -]: lengths [3, 2, 2], the last one padding, and as many stretches. If b goes on from the
    first two tokens of a, its stretch has the prompt (0, 2); a sample c after it that does so, too, belongs to that stretch.
    """

    def __init__(
        self,
        segment_ids: torch.Tensor,
        *,
        device: torch.device | None = None,
        continuations: Sequence[Continuation] = (),
    ) -> None:
        """
        Args:
            segment_ids: number of the sample in its row, -1 = padding. (R, T). Best on the CPU: the host waits for a GPU's.
            device: that attends; None: where `segment_ids` are.
            continuations: samples whose prompt stands with another one.
        """
        self._device = device or segment_ids.device
        rows = segment_ids.cpu()
        changes = torch.ones(rows.shape, dtype=torch.bool)
        changes[:, 1:] = rows[:, 1:] != rows[:, :-1]
        starts = changes.reshape(-1).nonzero()[:, 0]
        stops = torch.cat([starts[1:], torch.tensor([rows.numel()])])
        self.lengths: list[int] = (stops - starts).tolist()  # of samples and stretches of padding, in order
        self.is_padding: list[bool] = (rows.reshape(-1)[starts] < 0).tolist()
        self.max_length = max(self.lengths)
        self.stretches = _stretches(starts.tolist(), self.lengths, self.is_padding, continuations)
        self._cumulative_lengths = torch.cat([starts, stops[-1:]]).to(torch.int32)
        self.no_padding = torch.ones(rows.shape, dtype=torch.bool, device=self._device)
        """What the model is given as its mask, (R, T). Given none, transformers looks in every forward for packed samples in the
        position ids, and the host waits for the device to tell."""
        _LAYOUTS.add(self)
        self.num_uses = 0

    @cached_property
    def cumulative_lengths(self) -> torch.Tensor:
        """On the device that attends, int32. [len(lengths) + 1]"""
        if self._device.type != "cuda":
            return self._cumulative_lengths.to(self._device)
        return self._cumulative_lengths.pin_memory().to(self._device, non_blocking=True)


def _stretches(
    starts: Sequence[int], lengths: Sequence[int], is_padding: Sequence[bool], continuations: Sequence[Continuation]
) -> list[Stretch]:
    """Neighbours that go on from one prompt are put together as long as that makes little padding and few copies of the prompt."""
    found: list[Stretch] = []
    number_at: dict[int, int] = {}  # of the stretch that begins there
    by_start = {each.start: each for each in continuations}
    for start, length, pads in zip(starts, lengths, is_padding, strict=True):
        each = by_start.get(start)
        prompt = None if each is None else (number_at[each.prompt_start], each.num_prompt_tokens)
        if prompt is not None and found[-1].prompt == prompt and _fits(found[-1].lengths, length, prompt[1]):
            found[-1] = replace(found[-1], lengths=(*found[-1].lengths, length))
        else:
            number_at[start] = len(found)
            found.append(Stretch(lengths=(length,), is_padding=pads, prompt=prompt))
    return found


def _fits(lengths: Sequence[int], length: int, num_prompt_tokens: int) -> bool:
    longest, shortest = max(*lengths, length), min(*lengths, length)
    is_alike = shortest >= _MIN_FILLED * longest
    return is_alike and (len(lengths) + 1) * (num_prompt_tokens + longest) <= _MAX_STRETCH_KEYS


_LAYOUTS: WeakSet[SampleLayout] = WeakSet()


def _is_of_a_layout(mask: torch.Tensor) -> bool:
    """Whether it is the `no_padding` of a layout in use, or, as some models make it, another view of its memory."""
    memory = mask.untyped_storage().data_ptr()
    return any(layout.no_padding.untyped_storage().data_ptr() == memory for layout in _LAYOUTS)


def choose_attention(
    wanted: Literal["auto", "mask", "varlen"], *, device: torch.device, dtype: torch.dtype, config: Any = None
) -> tuple[AttentionName, str]:
    """What `model.attention` comes to on this device, and why: a clause for a message or the log.

    Args:
        dtype: of the forward pass (`model.compute_dtype`).
        config: Hugging Face config of the model, where known: some need what varlen lacks.

    Raises:
        ConfigError: varlen was asked for where it cannot run.
    """
    obstacle = _obstacle_to_varlen(device, dtype, config)
    if wanted == "varlen" and obstacle is not None:
        raise ConfigError(f"model.attention: varlen cannot run: {obstacle}; set it to mask, or to auto")
    if wanted == "mask":
        return "mask", "asked for"
    if obstacle is not None:
        return "mask", obstacle
    return "varlen", "asked for" if wanted == "varlen" else "a GPU and 16 bits"


def _obstacle_to_varlen(device: torch.device, dtype: torch.dtype, config: Any) -> str | None:
    if device.type != "cuda":
        return f"it needs a GPU, and the trainer computes on {device.type}"
    if dtype not in _VARLEN_DTYPES:
        return f"it needs bfloat16 or float16, and model.compute_dtype is {str(dtype).removeprefix('torch.')}"
    if config is None:
        return None
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return "it has no soft-capping, and the model sets `attn_logit_softcapping`"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim > _VARLEN_MAX_HEAD_DIM:
        return f"its heads have at most {_VARLEN_MAX_HEAD_DIM} dimensions, and those of the model have {head_dim}"
    return None


def use_attention(model: Any, name: AttentionName) -> None:
    """Make every layer of a Hugging Face model call our function.

    Raises:
        ConfigError: the model's attention cannot be replaced.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    full_name = f"grpo_async_{name}"
    AttentionInterface.register(full_name, _mask_attention if name == "mask" else _varlen_attention)
    AttentionMaskInterface.register(full_name, _make_mask)
    model.set_attn_implementation(full_name)
    if model.config.get_text_config()._attn_implementation != full_name:
        raise ConfigError(
            f"model.path: the attention of {type(model).__name__} cannot be told where packed samples lie; "
            "this family cannot be trained"
        )


def _make_mask(**arguments: Any) -> CausalMask:
    """What transformers calls once for each kind of layer."""
    # vmap: the model changes the mask by a function of its own; bidirectional: attention to later tokens
    if arguments.get("use_vmap") or "allow_is_bidirectional_skip" in arguments:
        raise ConfigError("model.path: the model's attention is not causal everywhere; this family cannot be trained")
    mask = arguments.get("attention_mask")
    if mask is not None and not _is_of_a_layout(mask):
        raise ValueError("a padded batch is told by sample_layout, not by attention_mask")
    return CausalMask(arguments.get("local_size"))


# both read the layout's Python numbers, which change with every batch: traced, they would be compiled again for each
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask_attention(
    module: nn.Module,
    query: torch.Tensor,  # (R, H, T, D)
    key: torch.Tensor,  # (R, H_kv, T, D)
    value: torch.Tensor,  # (R, H_kv, T, D)
    attention_mask: CausalMask | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls, for `mask`. Returns (R, T, H, D)."""
    layout, scale, window, softcap = _settings(module, query, attention_mask, arguments)
    rows, heads, tokens, _ = query.shape
    # one long row; split and cat, because the gradient of a slice is as large as what it was cut from
    flat = [states.transpose(0, 1).reshape(1, states.shape[1], rows * tokens, -1) for states in (query, key, value)]
    pieces = []
    sizes = [stretch.num_tokens for stretch in layout.stretches]
    parts = list(zip(*(torch.split(states, sizes, dim=2) for states in flat), strict=True))
    # of each prompt keys and values, cut out once for all that go on from there
    prompts: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for (q, k, v), stretch in zip(parts, layout.stretches, strict=True):
        if stretch.prompt is not None:
            if stretch.prompt not in prompts:
                number, num_tokens = stretch.prompt
                _, prompt_k, prompt_v = parts[number]
                prompts[stretch.prompt] = prompt_k[:, :, :num_tokens], prompt_v[:, :, :num_tokens]
            settings = stretch.lengths, scale, window, softcap
            pieces.append(_ContinuedAttention.apply(q, k, v, *prompts[stretch.prompt], *settings))  # type: ignore[no-untyped-call]
            continue
        k, v = repeated(k, heads), repeated(v, heads)
        if stretch.is_padding:
            # each of its tokens sees itself only; q and k get gradients (of zeros), as parameters must
            q, k, v = (states.transpose(0, 2) for states in (q, k, v))
            pieces.append(attend(q, k, v, scale, None, softcap).transpose(0, 2))
        else:
            pieces.append(attend(q, k, v, scale, window, softcap))
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
    """What transformers calls, for `varlen`. Shapes as above."""
    from torch.nn.attention.varlen import varlen_attn

    layout, scale, window, softcap = _settings(module, query, attention_mask, arguments)
    assert all(stretch.prompt is None for stretch in layout.stretches), (
        "shared prompts are planned where Policy.obstacle_to_shared_prompts is None"
    )
    if softcap is not None:
        raise ConfigError("model.attention: varlen has no soft-capping, and the model sets one; set it to mask")
    rows, heads, tokens, _ = query.shape
    options: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:
        key, value = repeated(key, heads), repeated(value, heads)
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
        # keys before and after the query that it sees, beside its own; -1 = all
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return output.reshape(rows, tokens, heads, -1), None


def _settings(
    module: nn.Module, query: torch.Tensor, attention_mask: CausalMask | None, arguments: dict[str, Any]
) -> tuple[SampleLayout, float, int | None, float | None]:
    """Layout, scale of the scores, window and softcap of this layer; refuses what would be left out silently."""
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
    if layout is None:  # the model is called by itself, not by Policy (which looks at num_uses): a sample in every row
        layout = SampleLayout(torch.zeros(query.shape[0], query.shape[2], dtype=torch.int64, device=query.device))
    layout.num_uses += 1
    scale = arguments.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return layout, scale, attention_mask.window, arguments.get("softcap")


def repeated(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Heads of keys or values repeated for grouped queries. (B, H_kv, L, D) -> (B, H, L, D)"""
    batch, kv_heads, length, width = states.shape
    if kv_heads == heads:
        return states
    grouped = states[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, width)
    return grouped.reshape(batch, heads, length, width)


class _ContinuedAttention(torch.autograd.Function):
    """Causal attention of samples that go on from one prompt, which stands elsewhere. (1, H, L, D) What they attend to is put
    together once more in the backward pass: held until then, the copies of a long prompt would take the memory that sharing it
    saves."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,  # (1, H, L, D), one sample after the other
        k: torch.Tensor,  # (1, H_kv, L, D)
        v: torch.Tensor,
        prompt_k: torch.Tensor,  # (1, H_kv, P, D)
        prompt_v: torch.Tensor,
        lengths: tuple[int, ...],  # of the samples, L together
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, prompt_k, prompt_v)
        ctx.settings = lengths, scale, window, softcap
        states = _together(q, k, v, prompt_k, prompt_v, lengths)
        return _unstacked(attend(*states, scale, window, softcap), lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, prompt_k, prompt_v = ctx.saved_tensors
        lengths, scale, window, softcap = ctx.settings
        states = _together(q, k, v, prompt_k, prompt_v, lengths)
        gradients = [torch.zeros_like(each) for each in states]
        upstream = _stacked(gradient, lengths)
        for block in _blocks(states[0].shape[2], states[1].shape[2], window, q.device):
            # one at a time: its mask and its scores are gone before the next
            parts = [each[:, :, part] for each, part in zip(states, block.parts, strict=True)]
            inputs = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                output = _attend_block(inputs[0], inputs[1], inputs[2], block.visible, scale, softcap)
            found = torch.autograd.grad(output, inputs, upstream[:, :, block.queries])
            for whole, part, each in zip(gradients, block.parts, found, strict=True):
                whole[:, :, part] += each
        num_prompt_tokens = prompt_k.shape[2]
        from_keys, from_values = (_of_groups(each, k.shape[1]) for each in gradients[1:])
        return (
            _unstacked(gradients[0], lengths),
            _unstacked(from_keys[:, :, num_prompt_tokens:], lengths),
            _unstacked(from_values[:, :, num_prompt_tokens:], lengths),
            from_keys[:, :, :num_prompt_tokens].sum(0, keepdim=True),
            from_values[:, :, :num_prompt_tokens].sum(0, keepdim=True),
            None,
            None,
            None,
            None,
        )


def _together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prompt_k: torch.Tensor,
    prompt_v: torch.Tensor,
    lengths: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (B, H, L, D) of B samples, keys and values (B, H, P + L, D), padded at their ends, where only padding sees it."""
    queries, keys, values = (_stacked(states, lengths) for states in (q, k, v))
    keys, values = (
        repeated(torch.cat((prompt.expand(len(lengths), -1, -1, -1), own), dim=2), q.shape[1])
        for prompt, own in ((prompt_k, keys), (prompt_v, values))
    )
    return queries, keys, values


def _stacked(states: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """(1, H, sum of lengths, D) -> (number of lengths, H, longest, D)"""
    longest = max(lengths)
    samples = torch.split(states[0], list(lengths), dim=1)
    return torch.stack([F.pad(each, (0, 0, 0, longest - each.shape[1])) for each in samples])


def _unstacked(states: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """The other way."""
    return torch.cat([each[:, :length] for each, length in zip(states, lengths, strict=True)], dim=1)[None]


def _of_groups(states: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Gradients of repeated heads -> of the heads that were repeated. (B, H, L, D) -> (B, H_kv, L, D)"""
    batch, heads, length, width = states.shape
    return states.reshape(batch, kv_heads, heads // kv_heads, length, width).sum(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Queries that attend at a time."""

    queries: slice
    keys: slice
    """All that one of them sees."""
    visible: torch.Tensor
    """(queries, keys) bool"""

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """Of queries, keys and values."""
        return self.queries, self.keys, self.keys


def _blocks(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Iterator[_Block]:
    """The queries are those of the last keys."""
    earlier = num_keys - num_queries
    for start in range(0, num_queries, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, num_queries)
        begin, end = earlier + start, earlier + stop  # of the block among the keys
        first = 0 if window is None else max(0, begin - window + 1)
        distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)[None, :]
        visible = (distance >= 0) & (distance < (math.inf if window is None else window))
        yield _Block(queries=slice(start, stop), keys=slice(first, end), visible=visible)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Causal attention inside each of B samples; q (B, H, L, D), k and v (B, H, P + L, D): the queries' own keys come
    after P earlier ones. A window of W: a token sees itself and the W - 1 before it."""
    window = None if window is None or window >= k.shape[2] else window
    if window is None and softcap is None and q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    outputs = []
    for block in _blocks(q.shape[2], k.shape[2], window, q.device):
        part = (q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys])
        if softcap is not None and torch.is_grad_enabled():
            # scores are computed again in the backward pass, not held for every block
            outputs.append(checkpoint(_softcapped, *part, block.visible, scale, softcap, use_reentrant=False))
        else:
            outputs.append(_attend_block(*part, block.visible, scale, softcap))
    return torch.cat(outputs, dim=2)


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return _softcapped(q, k, v, visible, scale, softcap)


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """softmax(softcap x tanh(q k / softcap)) v (Gemma 2, arXiv 2408.00118)."""
    scores = torch.tanh((q @ k.transpose(-2, -1)) * (scale / softcap)) * softcap
    scores = scores.float().masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
