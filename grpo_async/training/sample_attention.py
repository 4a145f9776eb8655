"""Attention of one sample, and of several that go on from one prompt: causal, in a window or not, soft-capped or not.

No mask is larger than a block of queries, and nothing is held for the backward pass but what was given.
"""

from __future__ import annotations

import math
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
        return _attend_together(q, k, v, prompt_k, prompt_v, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [states.detach().requires_grad_() for states in ctx.saved_tensors]
        with torch.enable_grad():
            output = _attend_together(*inputs, *ctx.settings)
        return (*torch.autograd.grad(output, inputs, gradient), None, None, None, None)


def _attend_together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prompt_k: torch.Tensor,
    prompt_v: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """All samples at once, padded at their ends, where only padding sees it. Shapes as above."""
    queries, keys, values = (_stacked(states, lengths) for states in (q, k, v))
    keys, values = (
        repeated(torch.cat((prompt.expand(len(lengths), -1, -1, -1), own), dim=2), q.shape[1])
        for prompt, own in ((prompt_k, keys), (prompt_v, values))
    )
    output = attend(queries, keys, values, scale, window, softcap)
    return torch.cat([each[:, :length] for each, length in zip(output, lengths, strict=True)], dim=1)[None]


def _stacked(states: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """(1, H, sum of lengths, D) -> (number of lengths, H, longest, D)"""
    longest = max(lengths)
    samples = torch.split(states[0], list(lengths), dim=1)
    return torch.stack([F.pad(each, (0, 0, 0, longest - each.shape[1])) for each in samples])


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Causal attention inside each of B samples; q (B, H, L, D), k and v (B, H, P + L, D): the queries' own keys come
    after P earlier ones. A window of W: a token sees itself and the W - 1 before it."""
    length, earlier = q.shape[2], k.shape[2] - q.shape[2]
    window = None if window is None or window >= earlier + length else window
    if window is None and softcap is None and not earlier:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    blocks = []
    for start in range(0, length, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, length)
        begin, end = earlier + start, earlier + stop  # of the block among the keys
        first = 0 if window is None else max(0, begin - window + 1)
        distance = (
            torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)[None, :]
        )
        visible = (distance >= 0) & (distance < (math.inf if window is None else window))  # (block, keys)
        part = (q[:, :, start:stop], k[:, :, first:end], v[:, :, first:end])
        if softcap is None:
            blocks.append(F.scaled_dot_product_attention(*part, attn_mask=visible, scale=scale))
        elif torch.is_grad_enabled():  # scores are computed again in the backward pass, not held for every block
            blocks.append(checkpoint(_softcapped, *part, visible, scale, softcap, use_reentrant=False))
        else:
            blocks.append(_softcapped(*part, visible, scale, softcap))
    return torch.cat(blocks, dim=2)


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """softmax(softcap x tanh(q k / softcap)) v (Gemma 2, arXiv 2408.00118)."""
    scores = torch.tanh((q @ k.transpose(-2, -1)) * (scale / softcap)) * softcap
    scores = scores.float().masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
