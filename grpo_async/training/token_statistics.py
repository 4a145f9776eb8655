"""The trainer's statistics of each trained token in the first pass, from the ranks that computed them to their rollouts.

    rank 0     TokenPlan         which tokens each rank will have, and in which order; `capacity` is part of the step's command
    each rank  TokenCollector    writes them one after another on the device, (5, capacity); one copy to the host
    rank 0     TokenPlan.by_rollout    TokenStats by rollout id

Nothing here waits for the device. A token takes 20 bytes on its rank, and on rank 0 until its group is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from grpo_async.batching.plan import BatchPlan
from grpo_async.records import RolloutSample, TokenFlag, TokenStats
from grpo_async.training.loss import ObjectiveOutput

_ROWS = ("logprobs", "proximal_logprobs", "weights", "entropies", "flags")
_FLAGS = len(_ROWS) - 1


class TokenCollector:
    """Collects at most `capacity` tokens on one rank in one step: `add` after each micro-batch, then `begin_copy`, then
    `on_host`."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._values = torch.zeros(len(_ROWS), capacity, dtype=torch.float32, device=device)
        self._num_tokens = 0
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def add(self, output: ObjectiveOutput) -> None:
        inputs, start = output.inputs, self._num_tokens
        self._num_tokens = stop = start + inputs.logprobs.numel()
        values = (inputs.logprobs, inputs.proximal_logprobs, output.importance_weights, inputs.entropy)
        for row, value in enumerate(values):
            self._values[row, start:stop] = value.detach()
        flags = self._values[_FLAGS, start:stop]
        for flag, holds in (
            (TokenFlag.CLIPPED_LOW, output.token_loss.clipped_low),
            (TokenFlag.CLIPPED_HIGH, output.token_loss.clipped_high),
            (TokenFlag.CLIPPED_HIGH, output.token_loss.is_capped),  # never both: one needs A > 0, the other A < 0
            (TokenFlag.IMPORTANCE_MASKED, output.is_importance_masked),
            (TokenFlag.OFF_POLICY_MASKED, output.is_off_policy),
        ):
            if holds is not None:
                flags.add_(holds, alpha=float(flag))

    def begin_copy(self) -> None:
        """Enqueue the copy to the host on the device's stream, without waiting for it."""
        if self._values.device.type != "cuda":
            self._host = self._values
            return
        self._host = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
        self._host.copy_(self._values, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def on_host(self) -> torch.Tensor:
        """This rank's statistics, (5, capacity) float32 on the CPU. Call it after the update's own transfer: the copy is before
        that in the stream, so there is nothing left to wait for."""
        assert self._host is not None
        if self._copied is not None:
            self._copied.synchronize()  # returns at once after the update's transfer
        return self._host


class _Place(NamedTuple):
    """The place of one sample: `start` to `stop` of the statistics that `rank` collected."""

    rollout_id: str
    minibatch: int
    rank: int
    start: int
    stop: int


class TokenPlan:
    """On rank 0: where the tokens of the step's samples will be. Call `add` for each minibatch, in the step's order."""

    def __init__(self, world_size: int) -> None:
        self._num_minibatches = 0
        self._num_tokens = [0] * world_size
        self._places: list[_Place] = []

    def add(self, samples: Sequence[RolloutSample], plan: BatchPlan, *, is_stored: Sequence[bool]) -> None:
        """Add one minibatch. `is_stored`: whether the rollout store keeps a sample. [num_samples]

        Samples of 3 and 2 trained tokens in one micro-batch, of which the second is stored: its place is 3 to 5."""
        for rank, micro_batches in enumerate(plan.ranks):
            for index in (index for micro_batch in micro_batches for index in micro_batch.indices):
                start = self._num_tokens[rank]
                self._num_tokens[rank] = stop = start + samples[index].num_trained_tokens
                if is_stored[index] and stop > start:
                    self._places.append(_Place(samples[index].rollout_id, self._num_minibatches, rank, start, stop))
        self._num_minibatches += 1

    @property
    def capacity(self) -> int:
        """The capacity of every rank's collector; 0 if nothing is stored, so that nothing is collected."""
        return max(self._num_tokens) if self._places else 0

    def by_rollout(self, collected: Sequence[torch.Tensor], trained: Sequence[bool]) -> dict[str, TokenStats]:
        """The statistics of each stored sample, by its rollout's id, from what each rank collected [world_size]; tokens of a
        minibatch that was not `trained` [num_minibatches] are flagged SKIPPED."""
        found = {}
        for place in self._places:
            # a copy: views would keep the statistics of the whole step alive until the last of its groups is written
            numbers = collected[place.rank][:, place.start : place.stop].numpy().copy()
            flags = numbers[_FLAGS].astype(np.uint8)
            if not trained[place.minibatch]:
                flags |= np.uint8(TokenFlag.SKIPPED)
            rows: dict[str, Any] = dict(zip(_ROWS, [*numbers[:_FLAGS], flags], strict=True))
            found[place.rollout_id] = TokenStats(**rows)
        return found
