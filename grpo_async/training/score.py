"""Log-probabilities that the trainer gives to whole token sequences, to be compared with a server's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.training.policy import Policy, PolicyOutput
from grpo_async.training.shard import reshard


def score_sequences(policy: Policy, sequences: Sequence[Sequence[int]], *, device: torch.device) -> list[list[float]]:
    """log softmax(logits) at temperature 1 of every token but the first, given those before it; natural log.

    A collective: every rank calls it with the same sequences, one forward for each.

    Args:
        sequences: at least two token ids each.

    Returns:
        One list per sequence, one entry shorter than it.
    """
    scores: list[list[float]] = []
    with torch.no_grad():
        for sequence in sequences:
            output: PolicyOutput = policy(_one_row(sequence).to(device), temperature=1.0)
            scores.append(output.logprobs.tolist())
    reshard(policy)
    return scores


def _one_row(sequence: Sequence[int]) -> MicroBatch:
    length, num_scored = len(sequence), len(sequence) - 1
    ids = torch.tensor(sequence, dtype=torch.int64)
    unused = torch.zeros(num_scored, dtype=torch.float32)
    return MicroBatch(
        input_ids=ids[None],
        position_ids=torch.arange(length)[None],
        segment_ids=torch.zeros(1, length, dtype=torch.int64),
        source_index=torch.arange(num_scored),
        target_ids=ids[1:],
        sample_index=torch.zeros(num_scored, dtype=torch.int64),
        sampler_logprobs=unused,
        advantages=unused,
        weights=unused,
        staleness=torch.zeros(num_scored, dtype=torch.int64),
    )
