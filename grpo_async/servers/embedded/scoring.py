"""Log-probabilities of given tokens by a plain forward of the model, in pieces, so that few rows of logits exist at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ROWS = 256  # of logits at a time: 150 MB in float32 with a vocabulary of 150 000


@torch.inference_mode()
def score_tokens(model: Any, token_ids: Sequence[int]) -> list[float]:
    """log softmax(logits) at temperature 1, natural log: entry i is of token_ids[i + 1] given those before it.

    Args:
        model: causal language model in eval mode.
        token_ids: [length], at least 2.

    Returns:
        [length - 1]; not finite where the model's logits are not.
    """
    from transformers.cache_utils import DynamicCache

    tokens = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    cache = DynamicCache()  # its own: the slots belong to the running sequences
    scores: list[float] = []
    for start in range(0, len(tokens) - 1, _ROWS):
        end = min(start + _ROWS, len(tokens) - 1)
        logits = model(
            input_ids=tokens[start:end].unsqueeze(0),
            position_ids=positions[start:end].unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
        ).logits[0]  # [end - start, vocab]
        logits = logits.float()
        chosen = logits.gather(1, tokens[start + 1 : end + 1, None])[:, 0]
        scores.extend((chosen - logits.logsumexp(-1)).tolist())
    return scores
