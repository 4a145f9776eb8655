"""The varlen attention that TRL's trainer takes from a GPU kernel (flash-attn 3 from the hub), for a CPU.

TRL 1.16 packs the samples of a row into a prefix tree and attends by `flash_attn_varlen_func`, one segment of the tree at a
time; its only implementation is the GPU kernel. Without a stand-in the trainer does not run on a CPU at all.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


class CpuKernel:
    """Stands for the module that TRL's `packing._flash_attn()` returns."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,  # (N, H, D)
        key: torch.Tensor,  # (K, H_kv, D)
        value: torch.Tensor,  # (K, H_kv, D)
        starts_q: torch.Tensor,  # (S + 1) segment boundaries
        starts_k: torch.Tensor,  # (S + 1) path boundaries
        longest_q: int,
        longest_k: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Every segment's queries attend to the keys of its path, aligned at its end. Returns (N, H, D).

        Raises:
            NotImplementedError: a window or a mask that is not causal.
        """
        if not causal or window_size != (-1, -1):
            raise NotImplementedError("plain causal attention only")
        queries = torch.split(query, starts_q.diff().tolist())
        keys, values = (torch.split(states, starts_k.diff().tolist()) for states in (key, value))
        pieces = [_attend(*each, softmax_scale) for each in zip(queries, keys, values, strict=True)]
        return torch.cat(pieces)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of the last tokens of a path to the path, (Q, H, D) and (K, H_kv, D); a root's Q is K."""
    lead = key.shape[0] - query.shape[0]
    heads, kv_heads = query.shape[1], key.shape[1]
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    if heads != kv_heads:
        k, v = (states.repeat_interleave(heads // kv_heads, dim=1) for states in (k, v))
    if lead == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(lead)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)[0].transpose(0, 1)
