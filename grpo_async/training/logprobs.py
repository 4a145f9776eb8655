"""Log-probabilities and entropies of chosen tokens, in chunks: full logits (N, vocab) are never held.

Each chunk is recomputed in the backward pass (activation checkpointing), so its logits live only while it is computed; the
gradient is exact.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def chunked_logprobs(
    hidden: torch.Tensor, target_ids: torch.Tensor, head: nn.Module, *, temperature: float, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(head(hidden) / temperature) at the targets, and the entropy of that distribution (without gradient).

    Args:
        hidden: state before each target. (N, H), N >= 1
        target_ids: (N,)
        head: maps (n, H) to (n, vocab).
        chunk_tokens: logits are computed for this many tokens at a time.

    Returns:
        logprobs (N,) and entropies (N,), both float32.
    """

    def one_chunk(states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(states).float() / temperature
        normalizer = torch.logsumexp(logits, dim=-1)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer
        with torch.no_grad():
            # H = logsumexp - sum p x: no log of a probability that underflowed to 0
            probabilities = torch.softmax(logits, dim=-1)
            entropy = normalizer - (probabilities * logits).sum(-1)
        return chosen, entropy

    parts = [
        checkpoint(one_chunk, states, targets, use_reentrant=False)
        for states, targets in zip(
            torch.split(hidden, chunk_tokens), torch.split(target_ids, chunk_tokens), strict=True
        )
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
