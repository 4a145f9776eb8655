"""What attention has to keep to, as one dense mask: the oracle for what attends sample by sample."""

from __future__ import annotations

import torch

from grpo_async.batching.pack import MicroBatch


def dense_mask(batch: MicroBatch) -> torch.Tensor:
    """True where the query (row axis) may see the key: same sample, or its prompt, and not later. (R, 1, T, T) bool.

    Padding sees itself only: a row of the mask without any True would make softmax NaN.
    """
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    padding = batch.segment_ids < 0
    same &= ~(padding[:, :, None] | padding[:, None, :])
    length = batch.segment_ids.shape[1]
    for each in batch.continuations:
        row, start = divmod(each.start, length)
        prompt = slice(each.prompt_start - row * length, each.prompt_start - row * length + each.num_prompt_tokens)
        same[row, batch.segment_ids[row] == batch.segment_ids[row, start], prompt] = True
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.segment_ids.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=batch.segment_ids.device)
    return ((same & causal) | itself)[:, None]
