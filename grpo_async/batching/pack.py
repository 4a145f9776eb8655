"""Makes the tensors of micro-batches from planned samples: rank 0 splits the columns of the samples by rank, and each rank packs
its own. No Python object per token, and no loop over tokens.

    RolloutSample... -> split_by_rank -> RankSamples (sent) -> RankSamples.pack -> MicroBatch...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from grpo_async.batching.plan import BatchPlan, MicroBatchPlan
from grpo_async.records import BoolArray, FloatArray, IntArray, RolloutSample, TopArray, joined

Rows: TypeAlias = slice | torch.Tensor
"""Some of the trained tokens of a micro-batch: a slice, or their numbers, int64."""


class Segment(NamedTuple):
    """Neighboring tokens of a row: those of a sample that are computed for it, or padding."""

    length: int
    shared: int = 0
    """Tokens of the sample before them, which the sample of the segment before it begins with, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward of one rank. R rows of T tokens, N trained tokens in all samples together. `source_index` points at the position,
    in the flattened (R x T) grid, whose hidden state predicts the trained token: the token before it.

        samples 1 2 [5 6] and 1 2 [7], trained tokens in brackets, share 1 2:
        input_ids     1 2 5 6 7    source_index  1, 2, 1    targets  5 6 7
        position_ids  0 1 2 3 2    segments      4 tokens, 1 token after 2 shared ones"""

    input_ids: torch.Tensor  # (R, T) int64
    position_ids: torch.Tensor  # (R, T) int64, of the token in its sample
    segments: Sequence[Segment]  # of the flattened grid
    source_index: torch.Tensor  # (N,) int64
    target_ids: torch.Tensor  # (N,) int64
    sample_index: torch.Tensor  # (N,) int64, the sample that a token belongs to: 0, 1, ... without gaps
    sampler_logprobs: torch.Tensor  # (N,) float32
    advantages: torch.Tensor  # (N,) float32
    weights: torch.Tensor  # (N,) float32
    staleness: torch.Tensor  # (N,) int64, finished steps between sampling and training
    # (N,) float32, the sum of weight x log-probability; None: no distillation
    teacher_logprobs: torch.Tensor | None = None
    teacher_weights: torch.Tensor | None = None  # (N,) float32, the sum of these weights
    minibatch_tokens: int = 0  # trained tokens of the whole minibatch, of all micro-batches and ranks
    # (N,) int64, the trained tokens by the rank of a context-parallel group that predicts them
    by_rank: torch.Tensor | None = None
    tokens_of_ranks: Sequence[int] = ()  # how many each predicts
    top_ids: torch.Tensor | None = None  # (N, K) int64, the sampler's likeliest tokens, if the loss needs them
    top_logprobs: torch.Tensor | None = None  # (N, K) float32, the sampler's
    temperatures: torch.Tensor | None = None  # (N,) float32, NaN for that of the run; None: all are

    @property
    def num_trained_tokens(self) -> int:
        return int(self.target_ids.numel())

    def divided(self, size: int) -> MicroBatch:
        """The same micro-batch with its trained tokens divided among `size` ranks, which compute the tokens of a row in turns."""
        rank = self.source_index % size
        counts = torch.bincount(rank, minlength=size).tolist()
        return replace(self, by_rank=rank.argsort(stable=True), tokens_of_ranks=counts)

    def of_tokens(self, rows: Rows) -> MicroBatch:
        """The same micro-batch with only these of its trained tokens."""
        names = ["source_index", "target_ids", "sample_index", "sampler_logprobs", "advantages", "weights", "staleness"]
        if self.teacher_logprobs is not None:
            names += ["teacher_logprobs", "teacher_weights"]
        parts: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        if self.top_ids is not None and self.top_logprobs is not None:
            parts |= {"top_ids": self.top_ids[rows], "top_logprobs": self.top_logprobs[rows]}
        return replace(self, **parts)

    def to(self, device: torch.device) -> MicroBatch:
        """Move the micro-batch, which is on the CPU, to `device`. Copies to a GPU start from pinned memory: from any other memory,
        the host would wait for everything that the GPU has queued before it."""
        is_gpu = device.type == "cuda"
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: (value.pin_memory() if is_gpu else value).to(device, non_blocking=is_gpu)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSamples:
    """One rank's part of a minibatch, as rank 0 sends it: S samples of L tokens in all, one after the other in packing order. It
    consists of a few flat arrays, however many samples there are; `pack` makes the tensors."""

    micro_batches: Sequence[MicroBatchPlan]
    lengths: NDArray[np.int64]  # (S,)
    advantages: FloatArray  # (S,)
    weights: FloatArray  # (S,), the weight of each trained token; see `batching.minibatch`
    token_ids: IntArray  # (L,)
    loss_mask: BoolArray  # (L,)
    sampler_logprobs: FloatArray  # (L,)
    policy_versions: IntArray  # (L,)
    trainer_version: int  # finished steps
    minibatch_tokens: int
    temperatures: FloatArray  # (S,), see MicroBatch
    teacher_logprobs: FloatArray | None = None  # (L,)
    teacher_weights: FloatArray | None = None  # (S,)
    top: TopArray | None = None  # (trained tokens, K)

    def pack(self, *, context_parallel: int = 1) -> list[MicroBatch]:
        """`context_parallel`: ranks that compute each micro-batch together; they predict its tokens in turns."""
        packed: list[MicroBatch] = []
        first, begin, num_trained = 0, 0, 0  # sample, token, trained token
        for plan in self.micro_batches:
            samples = slice(first, first + len(plan.indices))
            first = samples.stop
            tokens = slice(begin, begin + int(self.lengths[samples].sum()))
            begin = tokens.stop
            micro_batch = self._pack(plan, samples, tokens, num_trained)
            packed.append(micro_batch.divided(context_parallel) if context_parallel > 1 else micro_batch)
            num_trained += packed[-1].num_trained_tokens
        return packed

    def _pack(self, plan: MicroBatchPlan, samples: slice, tokens: slice, num_before: int) -> MicroBatch:
        """`num_before`: trained tokens of the micro-batches before this one."""
        lengths, ids, mask = self.lengths[samples], self.token_ids[tokens], self.loss_mask[tokens]
        segments, place = _lay_out(plan, lengths)
        sample = np.repeat(np.arange(len(lengths)), lengths)  # (L,) the sample that each token belongs to
        position = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # (L,) within it
        # a rank without samples computes one row of padding: FSDP's collectives need its forward
        num_rows = max(1, len(plan.rows))

        def grid(values: NDArray[np.int64], padding: int) -> torch.Tensor:
            filled = np.full(num_rows * plan.row_tokens, padding)
            filled[place] = values
            return torch.from_numpy(filled).view(num_rows, plan.row_tokens)

        trained = np.flatnonzero(mask)  # (N,)
        owner = sample[trained]  # (N,)
        temperatures = self.temperatures[samples][owner]  # (N,)
        more: dict[str, Any] = {}
        if self.teacher_logprobs is not None and self.teacher_weights is not None:
            more["teacher_logprobs"] = torch.from_numpy(self.teacher_logprobs[tokens][trained])
            more["teacher_weights"] = torch.from_numpy(self.teacher_weights[samples][owner])
        if self.top is not None:
            top = self.top[num_before : num_before + len(trained)]
            more["top_ids"] = torch.from_numpy(top["id"].astype(np.int64))
            more["top_logprobs"] = torch.from_numpy(top["logprob"].astype(np.float32))
        is_trained = np.bincount(owner, minlength=len(lengths)) > 0  # (S,)
        return MicroBatch(
            input_ids=grid(ids.astype(np.int64), 0),
            position_ids=grid(position, 0),
            segments=segments,
            source_index=torch.from_numpy(place[trained - 1]),
            target_ids=torch.from_numpy(ids[trained].astype(np.int64)),
            sample_index=torch.from_numpy((np.cumsum(is_trained) - 1)[owner]),
            sampler_logprobs=torch.from_numpy(self.sampler_logprobs[tokens][trained]),
            advantages=torch.from_numpy(self.advantages[samples][owner]),
            weights=torch.from_numpy(self.weights[samples][owner]),
            staleness=torch.from_numpy(self.trainer_version - self.policy_versions[tokens][trained].astype(np.int64)),
            minibatch_tokens=self.minibatch_tokens,
            **more,
            temperatures=None if np.isnan(temperatures).all() else torch.from_numpy(temperatures),
        )


def split_by_rank(
    samples: Sequence[RolloutSample], weights: Sequence[float], plan: BatchPlan, *, trainer_version: int
) -> list[RankSamples]:
    """Divide a minibatch among the ranks. [world_size] `weights`: of each trained token of each sample (`batching.minibatch`).
    [num_samples]"""
    counts = [sample.num_trained_tokens for sample in samples]
    is_taught = any(sample.teacher_logprobs is not None for sample in samples)
    orders = [[index for micro_batch in rank for index in micro_batch.indices] for rank in plan.ranks]
    parts = []
    for micro_batches, order in zip(plan.ranks, orders, strict=True):
        mine = [samples[index] for index in order]
        top = [sample.top for sample in mine if sample.top is not None]
        parts.append(
            RankSamples(
                micro_batches=micro_batches,
                lengths=np.array([len(sample.token_ids) for sample in mine], np.int64),
                advantages=np.array([sample.advantage for sample in mine], np.float32),
                weights=np.array([weights[index] for index in order], np.float32),
                temperatures=np.array([sample.temperature for sample in mine], np.float32),  # None becomes NaN
                token_ids=joined(np.int32, (sample.token_ids for sample in mine)),
                loss_mask=joined(np.bool_, (sample.loss_mask for sample in mine)),
                sampler_logprobs=joined(np.float32, (sample.sampler_logprobs for sample in mine)),
                policy_versions=joined(np.int32, (sample.policy_versions for sample in mine)),
                trainer_version=trainer_version,
                minibatch_tokens=sum(counts),
                teacher_logprobs=joined(np.float32, map(_teacher_logprobs, mine)) if is_taught else None,
                teacher_weights=np.array([each.teacher_weight for each in mine], np.float32) if is_taught else None,
                top=np.concatenate(top) if top else None,
            )
        )
    return parts


def _teacher_logprobs(sample: RolloutSample) -> FloatArray:
    """Zeros, with a weight of 0, for a sample of a checkpoint from before there were teachers."""
    return np.zeros(len(sample.token_ids), np.float32) if sample.teacher_logprobs is None else sample.teacher_logprobs


def _lay_out(plan: MicroBatchPlan, lengths: NDArray[np.int64]) -> tuple[list[Segment], NDArray[np.int64]]:
    """The segments of a micro-batch of S samples, and the place of each of their L tokens in its flattened grid. (L,)"""
    stops = np.cumsum(lengths)
    places = np.empty(int(lengths.sum()), np.int64)
    segments: list[Segment] = []
    shared_tokens = plan.shared or [0] * len(lengths)
    next_place = number = 0
    for indices in plan.rows or [[]]:
        row_stop = next_place + plan.row_tokens
        for _ in indices:
            begin, shared = int(stops[number] - lengths[number]), shared_tokens[number]
            own = int(lengths[number]) - shared
            if shared:
                before = begin - int(lengths[number - 1])
                places[begin : begin + shared] = places[before : before + shared]
            places[begin + shared : stops[number]] = np.arange(next_place, next_place + own)
            # it goes on where the one before it ends
            if segments and shared == segments[-1].shared + segments[-1].length:
                segments[-1] = Segment(segments[-1].length + own, segments[-1].shared)
            elif own:
                segments.append(Segment(own, shared))
            next_place += own
            number += 1
        if next_place < row_stop:
            segments.append(Segment(row_stop - next_place))
            next_place = row_stop
    return segments, places
