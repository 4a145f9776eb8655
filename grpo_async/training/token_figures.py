"""Figures of each trained token, from the ranks that computed them to the rollouts that they belong to.

    rank 0     FigurePlan    which micro-batches of which rank have tokens that are stored, and whose they are
                  | FigureOrder, in the step's command
    each rank  TokenCollector    writes them beside one another on the device, (5, room); one copy to the host
                  | CommandChannel.gather
    rank 0     FigurePlan.by_rollout    TokenFigures by rollout id

Nothing here waits for the device: the copy is put in the stream before the transfer that every update ends with anyway. A token
takes 20 bytes on its rank, and on rank 0 until its group is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_async.batching.plan import BatchPlan
from grpo_async.records import RolloutSample, TokenFigures, TokenMark
from grpo_async.training.loss import ObjectiveOutput

_ROWS = ("logprobs", "proximal_logprobs", "weights", "entropies", "marks")
_MARKS = len(_ROWS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureOrder:
    """What rank 0 asks of one rank.

    `room` is the same for all ranks: the most tokens that one of them has. What a rank has less is left 0.
    """

    is_wanted: Sequence[bool]  # of each micro-batch of the step that has a trained token, in their order
    room: int


class TokenCollector:
    """One rank, one step: call `add` after each micro-batch, then `begin_copy`, then `on_host`."""

    def __init__(self, order: FigureOrder, device: torch.device) -> None:
        self._order = order
        self._figures = torch.zeros(len(_ROWS), order.room, dtype=torch.float32, device=device)
        self._num_micro_batches = 0
        self._num_tokens = 0
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def add(self, output: ObjectiveOutput) -> None:
        """Note the tokens of the next micro-batch, where they are wanted."""
        self._num_micro_batches += 1
        if not self._order.is_wanted[self._num_micro_batches - 1]:
            return
        inputs, start = output.inputs, self._num_tokens
        self._num_tokens = stop = start + inputs.logprobs.numel()
        values = (inputs.logprobs, inputs.old_logprobs, output.used_weights, inputs.entropy)
        for row, value in enumerate(values):
            self._figures[row, start:stop] = value.detach()
        marks = self._figures[_MARKS, start:stop]
        for mark, holds in (
            (TokenMark.CLIPPED_LOW, output.token_loss.clipped_low),
            (TokenMark.CLIPPED_HIGH, output.token_loss.clipped_high),
            (TokenMark.CORRECTED_AWAY, output.is_corrected_away),
            (TokenMark.OFF_POLICY, output.is_off_policy),
            (TokenMark.LOW_ENTROPY, output.has_low_entropy),
        ):
            if holds is not None:
                marks.add_(holds, alpha=float(mark))

    def begin_copy(self) -> None:
        """Put the copy to the host behind what the device has to do so far; nothing waits for it here."""
        if self._figures.device.type != "cuda":
            self._host = self._figures
            return
        self._host = torch.empty(self._figures.shape, dtype=self._figures.dtype, pin_memory=True)
        self._host.copy_(self._figures, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def on_host(self) -> torch.Tensor:
        """All figures of this rank, (5, room) float32 on the CPU. Call it after the update's own transfer: the copy stands before
        that in the stream, so there is nothing left to wait for."""
        assert self._host is not None
        if self._copied is not None:
            self._copied.synchronize()  # for a copy that the transfer before has waited for
        return self._host


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the figures of one sample stand: `start` to `stop` of what `rank` has collected."""

    rollout_id: str
    minibatch: int
    rank: int
    start: int
    stop: int


class FigurePlan:
    """Rank 0: where the figures of the samples of one step will be. Call `add` for each minibatch, in the step's order."""

    def __init__(self, num_ranks: int) -> None:
        self._is_wanted: list[list[bool]] = [[] for _ in range(num_ranks)]
        self._num_minibatches = 0
        self._num_tokens = [0] * num_ranks
        self._places: list[_Place] = []

    def add(self, samples: Sequence[RolloutSample], plan: BatchPlan, *, is_wanted: Sequence[bool]) -> None:
        """One minibatch.

        A micro-batch is collected whole where it has a token that is wanted. Worked example: samples of 3 and 2 trained tokens in
        one micro-batch, of which the second is wanted: 5 tokens are collected, and its figures are 3 to 5.

        Args:
            plan: of `samples`; `batching.pack` lays out their tokens in its order.
            is_wanted: whether a sample's figures are stored. [num_samples]
        """
        counts = [sample.num_trained_tokens for sample in samples]
        for rank, micro_batches in enumerate(plan.ranks):
            for micro_batch in micro_batches:
                indices = [index for index in micro_batch.indices if counts[index]]
                if not indices:
                    continue
                is_collected = any(is_wanted[index] for index in indices)
                self._is_wanted[rank].append(is_collected)
                if is_collected:
                    self._lay_out(
                        rank, [(samples[index].rollout_id, counts[index], is_wanted[index]) for index in indices]
                    )
        self._num_minibatches += 1

    def _lay_out(self, rank: int, samples: Sequence[tuple[str, int, bool]]) -> None:
        """Give the samples of one micro-batch their places."""
        for rollout_id, num_tokens, is_wanted in samples:
            start = self._num_tokens[rank]
            self._num_tokens[rank] = stop = start + num_tokens
            if is_wanted:
                minibatch = self._num_minibatches
                self._places.append(
                    _Place(rollout_id=rollout_id, minibatch=minibatch, rank=rank, start=start, stop=stop)
                )

    def orders(self) -> list[FigureOrder | None]:
        """What each rank is to collect; None for all of them where nothing is wanted of any. [num_ranks]"""
        room = max(self._num_tokens)
        return [FigureOrder(is_wanted=is_wanted, room=room) if room else None for is_wanted in self._is_wanted]

    def by_rollout(self, collected: Sequence[torch.Tensor], updates: Sequence[bool]) -> dict[str, TokenFigures]:
        """The figures of each sample that was wanted, by its rollout's id; those of an update that was not made are marked SKIPPED.

        Args:
            collected: what `TokenCollector.on_host` gave on each rank. [num_ranks]
            updates: for each minibatch, whether its update was made. [num_minibatches]
        """
        figures = {}
        for place in self._places:
            # a copy: views would keep the figures of the whole step until the last of its groups is written
            numbers = collected[place.rank][:, place.start : place.stop].numpy().copy()
            marks = numbers[_MARKS].astype(np.uint8)
            if not updates[place.minibatch]:
                marks |= np.uint8(TokenMark.SKIPPED)
            rows: dict[str, Any] = dict(zip(_ROWS, [*numbers[:_MARKS], marks], strict=True))
            figures[place.rollout_id] = TokenFigures(**rows)
        return figures
