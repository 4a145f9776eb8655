"""Makes the tensors of micro-batches from planned samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from grpo_async.batching.plan import BatchPlan, MicroBatchPlan
from grpo_async.batching.prompts import num_prompt_tokens
from grpo_async.records import RolloutSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What stands of a sample in a micro-batch that has its prompt already: all that follows the prompt. Positions are those in the
    flattened (R x T) grid."""

    start: int
    """Where it begins."""
    prompt_start: int
    """Where the sample begins whose prompt it goes on from: earlier, in the same row."""
    num_prompt_tokens: int
    """How many tokens from there on are the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward of one rank. R rows of T tokens, N trained tokens in all rows together.

    `source_index` points at the position, in the flattened (R x T) grid, whose hidden state predicts the trained token: the
    token before it.

    Worked example, samples 1 2 [5 6] and 1 2 [7] with their prompt in common, trained tokens in brackets:

        input_ids     1 2 5 6 7    source_index  0 + 1, 2, 0 + 1    targets  5 6 7
        position_ids  0 1 2 3 2    segment_ids   0 0 0 0 1          continuations  at 4, of 2 tokens at 0
    """

    input_ids: torch.Tensor  # (R, T) int64
    position_ids: (
        torch.Tensor
    )  # (R, T) int64, restarts at 0 for every sample, or at the length of its prompt if that is elsewhere
    segment_ids: torch.Tensor  # (R, T) int64, number of the sample in its row; -1 = padding
    source_index: torch.Tensor  # (N,) int64
    target_ids: torch.Tensor  # (N,) int64
    sample_index: (
        torch.Tensor
    )  # (N,) int64, which sample of this micro-batch a token belongs to: 0, 1, ... without gaps
    sampler_logprobs: torch.Tensor  # (N,) float32
    advantages: torch.Tensor  # (N,) float32
    weights: torch.Tensor  # (N,) float32
    staleness: torch.Tensor  # (N,) int64, finished steps between sampling and training
    continuations: Sequence[Continuation] = ()  # samples whose prompt another one has; on the host
    minibatch_tokens: int = 0  # trained tokens of the whole minibatch, of all micro-batches and ranks
    most_rank_tokens: int = 0  # of that, those of the rank that has most
    host_segment_ids: torch.Tensor | None = (
        None  # (R, T) int64, `segment_ids` on the CPU, of a micro-batch that was moved
    )

    @property
    def num_trained_tokens(self) -> int:
        return int(self.target_ids.numel())

    def of_tokens(self, rows: slice) -> MicroBatch:
        """The same micro-batch with only these of its trained tokens."""
        names = ("source_index", "target_ids", "sample_index", "sampler_logprobs", "advantages", "weights", "staleness")
        parts: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **parts)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch, which is on the CPU, with its tensors on `device`. To a GPU they go from pinned memory: a copy from
        any other makes the host wait for all that the GPU has to do before it."""
        is_gpu = device.type == "cuda"
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: (value.pin_memory() if is_gpu else value).to(device, non_blocking=is_gpu)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **{**moved, "host_segment_ids": self.segment_ids})


def pack_rank(
    samples: Sequence[RolloutSample], weights: Sequence[float], plan: BatchPlan, rank: int, *, trainer_version: int
) -> list[MicroBatch]:
    """The micro-batches of one rank, on the CPU.

    Args:
        samples: all those of the minibatch.
        weights: of each trained token of each sample; see `batching.weights`. [num_samples]
        plan: of these samples.
        trainer_version: finished steps.
    """
    counts = [sample.num_trained_tokens for sample in samples]
    rank_tokens = [sum(counts[i] for part in parts for i in part.indices) for parts in plan.ranks]
    return [
        replace(
            _pack_micro_batch(samples, weights, micro_batch, trainer_version=trainer_version),
            minibatch_tokens=sum(counts),
            most_rank_tokens=max(rank_tokens),
        )
        for micro_batch in plan.ranks[rank]
    ]


def _pack_micro_batch(
    samples: Sequence[RolloutSample], weights: Sequence[float], plan: MicroBatchPlan, *, trainer_version: int
) -> MicroBatch:
    row_tokens = plan.row_tokens
    num_rows = max(1, len(plan.rows))  # an empty rank computes one row of padding: FSDP's collectives need its forward
    input_ids = torch.zeros(num_rows, row_tokens, dtype=torch.int64)
    position_ids = torch.zeros(num_rows, row_tokens, dtype=torch.int64)
    segment_ids = torch.full((num_rows, row_tokens), -1, dtype=torch.int64)
    source: list[int] = []
    targets: list[int] = []
    sample_index: list[int] = []
    num_samples = 0
    staleness: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    token_weight: list[float] = []
    starts: dict[int, int] = {}  # of samples that stand whole, in the flattened grid
    continuations: list[Continuation] = []
    for row, indices in enumerate(plan.rows):
        start = 0
        for segment, index in enumerate(indices):
            sample = samples[index]
            length = len(sample.token_ids)
            known = num_prompt_tokens(sample) if index in plan.continues else 0
            stop = start + length - known
            input_ids[row, start:stop] = torch.tensor(sample.token_ids[known:], dtype=torch.int64)
            position_ids[row, start:stop] = torch.arange(known, length)
            segment_ids[row, start:stop] = segment
            trained = [position for position, mask in enumerate(sample.loss_mask) if mask]
            begin = row * row_tokens + start
            if known:
                prompt_start = starts[plan.continues[index]]
                continuations.append(Continuation(start=begin, prompt_start=prompt_start, num_prompt_tokens=known))
                source.append(prompt_start + known - 1)  # the first trained token's is the last of the prompt
                source.extend(begin + position - known - 1 for position in trained[1:])
            else:
                starts[index] = begin
                source.extend(begin + position - 1 for position in trained)
            targets.extend(sample.token_ids[position] for position in trained)
            sample_index.extend([num_samples] * len(trained))
            num_samples += bool(trained)
            logprobs.extend(sample.sampler_logprobs[position] for position in trained)
            staleness.extend(trainer_version - sample.policy_versions[position] for position in trained)
            advantages.extend([sample.advantage] * len(trained))
            token_weight.extend([weights[index]] * len(trained))
            start = stop
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        segment_ids=segment_ids,
        source_index=torch.tensor(source, dtype=torch.int64),
        target_ids=torch.tensor(targets, dtype=torch.int64),
        sample_index=torch.tensor(sample_index, dtype=torch.int64),
        sampler_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(token_weight, dtype=torch.float32),
        staleness=torch.tensor(staleness, dtype=torch.int64),
        continuations=tuple(continuations),
    )
