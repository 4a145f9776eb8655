"""Attention of samples that are packed in one row as prefix trees; registered with transformers under two names.

    mask    scaled dot product attention, segment by segment: no (R, T, T) mask is ever made. Any device, any dtype.
    varlen  variable-length flash attention: one kernel for all segments. GPU, 16 bit.

Tokens see their own segment up to themselves, and the prefix that their sample shares. Full attention computes the two apart and
merges them by their normalizers, as ring attention does (arXiv 2310.01889): nothing is copied, and every prefix is read once for
all its samples. With a window or soft-capping, each segment attends to a copy of its keys.

The layout of the samples reaches the layers as the keyword `sample_layout`, the window of a layer as its mask, `CausalMask`. A
model that needs more than this (other masks, biases, sinks) is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise, starmap
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grpo_async.batching.pack import Segment
from grpo_async.config.base import AttentionName
from grpo_async.errors import ConfigError
from grpo_async.training.context_parallel import ContextGroup
from grpo_async.utils.text import dtype_name

_QUERY_BLOCK = 256  # queries that attend at a time in a window, or soft-capped

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_MAX_HEAD_DIM = 256
# arguments that change the outcome of a family's attention, and that neither function applies
_UNSUPPORTED = ("sinks", "position_bias", "alibi", "head_mask", "layer_head_mask")


class CausalMask:
    """Replaces the mask that transformers would make for a layer: causal, within a window of this many tokens (None = all)."""

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __getitem__(self, _: Any) -> CausalMask:
        return self  # what DeepSeek's attention cuts out for its indexer


class _Part:
    """Pairs of ranges of tokens: the queries of each see the keys of the same pair, all, or up to themselves if `is_causal`."""

    def __init__(self, pairs: Sequence[tuple[range, range]], device: torch.device, *, is_causal: bool = False) -> None:
        self.is_causal = is_causal
        self.query_lengths = [len(queries) for queries, _ in pairs]
        self.key_lengths = [len(keys) for _, keys in pairs]
        self._pairs, self._device = pairs, device

    @cached_property
    def queries(self) -> torch.Tensor:
        """Index of each query, in order. int64"""
        return _to_device(torch.cat([torch.arange(each.start, each.stop) for each, _ in self._pairs]), self._device)

    @cached_property
    def keys(self) -> torch.Tensor:
        """Index of each key, in order. int64"""
        return _to_device(torch.cat([torch.arange(each.start, each.stop) for _, each in self._pairs]), self._device)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries and keys of a pair."""
        return max(self.query_lengths), max(self.key_lengths)

    @cached_property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cumulative lengths of queries and keys. int32, [len(pairs) + 1]"""
        return _ends(self.query_lengths, self._device), _ends(self.key_lengths, self._device)


class SampleLayout:
    """Where the samples of one micro-batch are. Counts the layers that used it.

    Worked example, samples a a a b and a a a c c: segments of 4 tokens, and of 2 after 3 shared ones. Parts: each segment by itself
    (causal), and the queries 4 and 5 with the keys 0 to 2."""

    def __init__(
        self,
        segments: Sequence[Segment],
        shape: Sequence[int],
        device: torch.device,
        *,
        context: ContextGroup | None = None,
    ) -> None:
        """`shape`: (R, T), rows and the tokens of each that this rank computes. `device`: where attention runs.
        `context`: the ranks that compute the samples together."""
        self.context = context
        self.lengths = [segment.length for segment in segments]
        self.shared = [segment.shared for segment in segments]
        starts = [0, *accumulate(self.lengths)]
        self.parts = [_Part([(own, own) for own in starmap(range, pairwise(starts))], device, is_causal=True)]
        self.paths: list[list[tuple[int, int]]] = []
        """Of each segment, those that its prefix consists of, and the tokens of each."""
        groups = self._connect(segments, starts)
        self.parts += [_Part(pairs, device) for _, pairs in sorted(groups.items())]
        self.has_shared = len(self.parts) > 1
        self.no_padding = torch.ones(tuple(shape), dtype=torch.bool, device=device)
        """The mask that the model is given, (R, T). Given none, transformers looks for packed samples in the position ids in every
        forward, and the host waits for the device."""
        _LAYOUTS.add(self)
        self.num_uses = 0
        self._device = device
        self._ends_in_window: dict[int, tuple[torch.Tensor, int]] = {}

    def _connect(self, segments: Sequence[Segment], starts: Sequence[int]) -> dict[tuple[int, int], list[Any]]:
        """Find the path of every segment. Return the queries and keys of different segments, in parts of which none has a query
        or a key twice, by their order."""
        path: list[int] = []  # segments that the current sample consists of
        users: list[dict[int, range]] = [{} for _ in segments]  # of each segment's first n tokens: the queries after it
        depth: list[int] = []
        for number, segment in enumerate(segments):
            while path and segments[path[-1]].shared >= segment.shared:
                path.pop()
            prefix = [*path, number]
            tokens = [segments[after].shared - segments[before].shared for before, after in pairwise(prefix)]
            self.paths.append(list(zip(path, tokens, strict=True)))
            depth.append(len(path))
            for parent, child in pairwise(prefix):
                # `child` is the first segment with these keys or follows it, so that its queries continue theirs
                shared = segments[child].shared - segments[parent].shared
                first = users[parent].get(shared, range(starts[number], 0)).start
                users[parent][shared] = range(first, starts[number + 1])
            path = prefix
        groups: dict[tuple[int, int], list[Any]] = {}
        for number, queries_of in enumerate(users):
            for nth, (shared, queries) in enumerate(queries_of.items()):
                keys = range(starts[number], starts[number] + shared)
                groups.setdefault((depth[number], nth), []).append((queries, keys))
        return groups

    @cached_property
    def numbers(self) -> torch.Tensor:
        """The segment of each token of the only row, as causal-conv1d takes it. (1, T) int32"""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32)
        return _to_device(numbers.repeat_interleave(torch.tensor(self.lengths))[None], self._device)

    def keys_of(self, number: int, pieces: Sequence[torch.Tensor], window: int | None, *, dim: int) -> torch.Tensor:
        """Return the keys (or values) that a segment sees: the last window - 1 of its prefix, or all, then its own."""
        missing = self.shared[number] if window is None else min(self.shared[number], window - 1)
        found = [pieces[number]]
        for other, count in reversed(self.paths[number]):
            taken = min(count, missing)
            missing -= taken
            if taken:
                found.append(pieces[other].narrow(dim, count - taken, taken))
        return torch.cat(found[::-1], dim) if len(found) > 1 else found[0]

    def ends_in_window(self, window: int) -> tuple[torch.Tensor, int]:
        """Cumulative lengths of the keys that segments see in a window, int32 [len(lengths) + 1], and the most of one segment."""
        if window not in self._ends_in_window:  # the same in all layers
            lengths = [own + min(shared, window - 1) for own, shared in zip(self.lengths, self.shared, strict=True)]
            self._ends_in_window[window] = _ends(lengths, self._device), max(lengths)
        return self._ends_in_window[window]


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return _to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


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
    if text.model_type == "gpt_oss":
        return "it does not support attention sinks"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim > _VARLEN_MAX_HEAD_DIM:
        return f"it supports heads of at most {_VARLEN_MAX_HEAD_DIM} dimensions, and the model's have {head_dim}"
    return None


def use_attention(model: Any, name: AttentionName) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    full_name = f"grpo_async_{name}"
    AttentionInterface.register(
        full_name, partial(_attention, _mask_attention if name == "mask" else _varlen_attention)
    )
    AttentionMaskInterface.register(full_name, _make_mask)
    model.set_attn_implementation(full_name)
    for module in model.modules():
        if getattr(module, "indexer", None) is not None:  # of sparse attention: it chooses all tokens, see check_family
            module.indexer.forward = lambda *_, **__: ()
            module.indexer.requires_grad_(False)
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


# the layout's Python numbers change with every batch: torch.compile would recompile for each
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention(inner: Callable[..., Any], module: nn.Module, *states: Any, **arguments: Any) -> Any:
    """The attention function that transformers calls: `inner`, over the tokens of this rank or of all that compute the samples."""
    layout: SampleLayout | None = arguments.get("sample_layout")
    if layout is None or layout.context is None:
        return inner(module, *states, **arguments)
    return layout.context.attend(inner, module, *states, **arguments)


def _mask_attention(
    module: nn.Module,
    query: torch.Tensor,  # (R, H, T, D)
    key: torch.Tensor,  # (R, H_kv, T, D)
    value: torch.Tensor,  # (R, H_kv, T, D)
    attention_mask: CausalMask | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    layout, scale, window, softcap, sinks = _settings(module, query, attention_mask, arguments)
    q, k, v = (_flat(states) for states in (query, key, value))
    if window is None and softcap is None and sinks is None and q.device.type == "cpu":
        return _as_rows(_merged(q, k, v, layout, scale, _cpu_forward, _cpu_backward), query), None
    q, k, v = (states.transpose(0, 1)[None] for states in (q, _repeated(k, q), _repeated(v, q)))  # (1, H, R x T, D)
    # split, because the gradient of a slice is as large as the tensor that was sliced
    queries, keys, values = (torch.split(states, layout.lengths, dim=2) for states in (q, k, v))
    pieces = []
    for number, own in enumerate(queries):
        its_keys, its_values = (layout.keys_of(number, each, window, dim=2) for each in (keys, values))
        pieces.append(_attend(own, its_keys, its_values, scale, window, softcap, sinks))
    return _as_rows(torch.cat(pieces, dim=2)[0].transpose(0, 1), query), None


def _varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by one kernel for all segments. Shapes as above."""
    from torch.nn.attention.varlen import varlen_attn

    layout, scale, window, softcap, sinks = _settings(module, query, attention_mask, arguments)
    if softcap is not None or sinks is not None:
        raise ConfigError(
            "model.attention: varlen does not support soft-capping and sinks, and the model uses them; set it to mask"
        )
    q, k, v = (_flat(states) for states in (query, key, value))
    if layout.has_shared and window is None:
        return _as_rows(_merged(q, k, v, layout, scale, _gpu_forward, _gpu_backward), query), None
    options: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:
        k, v = _repeated(k, q), _repeated(v, q)
    ends_q = ends_k = layout.parts[0].ends[0]
    longest_q = longest_k = layout.parts[0].longest[0]
    if layout.has_shared and window is not None:
        ends_k, longest_k = layout.ends_in_window(window)
        for_each = [torch.split(states, layout.lengths) for states in (k, v)]
        numbers = range(len(layout.lengths))
        k, v = (torch.cat([layout.keys_of(n, each, window, dim=0) for n in numbers]) for each in for_each)
    output: Any = varlen_attn(
        q,
        k,
        v,
        ends_q,
        ends_k,
        longest_q,
        longest_k,
        scale=scale,
        # keys before and after the query that it sees, apart from its own; -1 = all
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return _as_rows(output, query), None


def _flat(states: torch.Tensor) -> torch.Tensor:
    """(R, H, T, D) -> (R x T, H, D)"""
    return states.transpose(1, 2).flatten(0, 1)


def _as_rows(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """(R x T, H, D) -> (R, T, H, D), where `query` is (R, H, T, D)"""
    return output.reshape(query.shape[0], query.shape[2], *output.shape[1:]).contiguous()  # some models call view


_Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, _Part, float], tuple[torch.Tensor, torch.Tensor]]
"""Attention of one part: output (queries, H, D) and normalizers, the log of the sum of exp(scores), (queries, H)."""
_Backward = Callable[[Sequence[torch.Tensor], _Part, float], Any]
"""Gets the gradient of the output, q, k, v, output and normalizers; returns the gradients of q, k and v."""


class _Merged(torch.autograd.Function):
    """Attention over several parts. With the output and normalizer of all parts, the backward kernel of flash attention gives what
    each part adds to the gradients. Shapes (R x T, H, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: SampleLayout,
        scale: float,
        forward: _Forward,
        backward: _Backward,
    ) -> torch.Tensor:
        own, *shared = layout.parts
        output, norm = forward(q, k, v, own, scale)
        if shared:  # not in place: recomputation keeps what a kernel returned
            output, norm = output.to(torch.promote_types(q.dtype, torch.float32), copy=True), norm.clone()
        for part in shared:
            i, j = part.queries, part.keys
            more, its_norm = forward(q[i], k[j], v[j], part, scale)
            before, after = norm[i], torch.logaddexp(norm[i], its_norm)
            output[i] = output[i] * (before - after).exp()[..., None] + more * (its_norm - after).exp()[..., None]
            norm[i] = after
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, norm)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, backward
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = upstream
        q, k, v, output, norm = ctx.saved_tensors
        own, *shared = ctx.layout.parts
        of_q, of_k, of_v = ctx.kernel((grad, q, k, v, output, norm), own, ctx.scale)
        for part in shared:
            i, j = part.queries, part.keys
            added = ctx.kernel((grad[i], q[i], k[j], v[j], output[i], norm[i]), part, ctx.scale)
            for total, index, more in zip((of_q, of_k, of_v), (i, j, j), added, strict=True):
                total[index] += more
        return of_q, of_k, of_v, *(None,) * 4


def _merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
    kind, size = q.device.type, v.shape[-1]
    if size != q.shape[-1]:  # kernels want as many dimensions of keys as of values (DeepSeek: 192 and 128)
        q, k, v = (F.pad(each, (0, max(q.shape[-1], size) - each.shape[-1])) for each in (q, k, v))
    if torch.is_autocast_enabled(kind):  # autocast does for torch's own attention, and does not know this one
        q, k, v = (states.to(torch.get_autocast_dtype(kind)) for states in (q, k, v))
    output: torch.Tensor = _Merged.apply(q, k, v, *others)  # type: ignore[no-untyped-call]
    return output[..., :size]


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: _Part, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    results = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*each, 0.0, part.is_causal, scale=scale)
        for each in zip(
            _pieces(q, part.query_lengths), *(_pieces(states, part.key_lengths) for states in (k, v)), strict=True
        )
    ]
    outputs, norms = zip(*results, strict=True)
    return torch.cat([each[0].transpose(0, 1) for each in outputs]), torch.cat([each[0].T for each in norms])


def _cpu_backward(tensors: Sequence[torch.Tensor], part: _Part, scale: float) -> tuple[torch.Tensor, ...]:
    grad, q, k, v, output, norm = tensors
    of_queries = [_pieces(states, part.query_lengths) for states in (grad, q, output)]
    of_keys = [_pieces(states, part.key_lengths) for states in (k, v)]
    norms = [each.T[None] for each in torch.split(norm, part.query_lengths)]
    results = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            its_grad, its_q, its_k, its_v, its_output, its_norm, 0.0, part.is_causal, scale=scale
        )
        for its_grad, its_q, its_output, its_k, its_v, its_norm in zip(*of_queries, *of_keys, norms, strict=True)
    ]
    return tuple(torch.cat([each[0].transpose(0, 1) for each in column]) for column in zip(*results, strict=True))


def _pieces(states: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """(tokens, H, D) -> (1, H, tokens of each piece, D)"""
    return [each.transpose(0, 1)[None] for each in torch.split(states, list(lengths))]


def _gpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: _Part, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output, norm, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *part.ends, *part.longest, 0.0, part.is_causal, False, scale=scale
    )
    return output, norm.T  # the kernel's is (H, queries)


def _gpu_backward(tensors: Sequence[torch.Tensor], part: _Part, scale: float) -> Any:
    grad, q, k, v, output, norm = tensors
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of dropout
    given = (grad.contiguous(), q, k, v, output, norm.T.contiguous(), *part.ends, *part.longest)
    return torch.ops.aten._flash_attention_backward(*given, 0.0, part.is_causal, unused, unused, scale=scale)


def _settings(
    module: nn.Module, query: torch.Tensor, attention_mask: CausalMask | None, arguments: dict[str, Any]
) -> tuple[SampleLayout, float, int | None, float | None, torch.Tensor | None]:
    """Layout, scale of the scores, window, softcap and sinks of this layer; refuses arguments that would be silently ignored."""
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
        rows, _, tokens, _ = query.shape
        layout = SampleLayout([Segment(tokens)] * rows, (rows, tokens), query.device)
    layout.num_uses += 1
    scale = arguments.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return layout, scale, attention_mask.window, arguments.get("softcap"), arguments.get("s_aux")


def _repeated(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat the heads of keys or values for grouped queries. (L, H_kv, D) -> (L, H, D)"""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of the last L of K tokens, (B, H, L, D) and (B, H, K, D). A window of W: a token sees itself and the W - 1
    before it. Sinks (H,) (GPT-OSS, arXiv 2309.17453): the score of a key that every token sees, whose value is zero."""
    length, past = q.shape[2], k.shape[2] - q.shape[2]
    window = None if window is None or window >= length + past else window
    if window is None and softcap is None and sinks is None and past == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if sinks is not None:  # one more dimension, in which only the sink's key is not zero
        q, k, v = F.pad(q, (0, 1), value=1 / scale), F.pad(k, (0, 1)), F.pad(v, (0, 1))
        sink = F.pad(sinks.to(k.dtype).expand(len(k), -1)[..., None, None], (k.shape[3] - 1, 0))
    outputs = []
    for begin in range(past, past + length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, past + length)
        first = 0 if window is None else max(0, begin - window + 1)  # first key that the block sees
        distance = (
            torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)[None, :]
        )
        visible = (distance >= 0) & (distance < (math.inf if window is None else window))  # (queries, keys)
        queries, keys, values = q[:, :, begin - past : end - past], k[:, :, first:end], v[:, :, first:end]
        if sinks is not None:
            keys, values = torch.cat([sink, keys], dim=2), F.pad(values, (0, 0, 1, 0))
            visible = F.pad(visible, (1, 0), value=True)
        if softcap is None:
            outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=scale))
        elif torch.is_grad_enabled():
            # scores are computed again in the backward pass, not held for every block
            block = (queries, keys, values, visible, scale, softcap)
            outputs.append(checkpoint(_softcapped, *block, use_reentrant=False))
        else:
            outputs.append(_softcapped(queries, keys, values, visible, scale, softcap))
    attended = torch.cat(outputs, dim=2)
    return attended if sinks is None else attended[..., :-1]


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """softmax(softcap x tanh(q k / softcap)) v (Gemma 2, arXiv 2408.00118)."""
    scores = torch.tanh((q @ k.transpose(-2, -1)) * (scale / softcap)) * softcap
    scores = scores.float().masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
