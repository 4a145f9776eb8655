"""Attention of one sample, and of several that go on from one prompt: causal, in a window or not, soft-capped or not.

No mask is larger than a block of queries. Of samples that go on from a prompt nothing is held for the backward pass but what was
given, and that pass goes block by block, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_QUERY_BLOCK = 256  # queries that attend at a time in a window, soft-capped, or to earlier keys


def repeated(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Heads of keys or values repeated for grouped queries. (B, H_kv, L, D) -> (B, H, L, D)"""
    batch, kv_heads, length, width = states.shape
    if kv_heads == heads:
        return states
    grouped = states[:, :, None].expand(batch, kv_heads, heads // kv_heads, length, width)
    return grouped.reshape(batch, heads, length, width)


def attend_after_prompt(
    samples: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    prompt: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[int, ...],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of samples that all go on from one prompt. (1, H, L, D)

    Args:
        samples: queries (1, H, L, D), keys and values (1, H_kv, L, D), one sample after the other.
        prompt: keys and values, (1, H_kv, P, D).
        lengths: of the samples, L together.
    """
    apply: Any = _ContinuedAttention.apply
    output: torch.Tensor = apply(*samples, *prompt, lengths, scale, window, softcap)
    return output


class _ContinuedAttention(torch.autograd.Function):
    """Attention of samples whose prompt stands elsewhere. What they attend to is put together once more in the backward pass: held
    until then, the copies of a long prompt would take the memory that sharing it saves."""

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
