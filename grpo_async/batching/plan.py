"""Decides which sample goes into which row, micro-batch and rank. Pure: works on lengths alone.

The samples of a micro-batch go into one row and nothing is padded (training/attention.py keeps them apart). Every rank gets the
same number of micro-batches, as many as first-fit by decreasing length needs; the m-th ones of all ranks run at the same time, so
samples go, longest first, each into the cheapest one with room, and neighbors by cost run together.

Lengths [5, 3, 4, 2], 2 ranks, 8 tokens per micro-batch: first-fit needs two. By cost, 5 and 4 go into one each, 3 joins the 4, 2
joins the 5 -> rank 0 has a row of samples [0, 3], rank 1 one of [2, 1]."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

EMPTY_ROW_TOKENS = 4
"""Padding tokens of a micro-batch without samples. It runs a forward for FSDP's collectives; it has more than one token because
torch.compile would generate separate code for one."""
_ATTENTION_BREAK_EVEN_TOKENS = 16_384
"""Sample length above which attention costs more than matrix products. In a layer of the usual shape the latter take 24 h^2
operations per token and causal attention 2 h L: they are equal at 12 h, 12,288 tokens for a hidden size of 1024. A plan
knows only lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    rows: Sequence[Sequence[int]]
    """Indices of the samples in each row; none where the rank has nothing to do."""
    row_tokens: int
    """Length of a row, which is that of the longest one."""

    @property
    def indices(self) -> list[int]:
        return [index for row in self.rows for index in row]

    @property
    def num_computed_tokens(self) -> int:
        """Rows x their length, padding included; one row of padding if there are no samples."""
        return max(1, len(self.rows)) * self.row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`ranks[r][m]` is what rank r computes in its m-th forward; every rank has the same number of forwards."""

    ranks: Sequence[Sequence[MicroBatchPlan]]

    @property
    def num_computed_tokens(self) -> int:
        return sum(micro_batch.num_computed_tokens for rank in self.ranks for micro_batch in rank)


@dataclass(slots=True, eq=False)
class _Bin:
    """A micro-batch to which samples are added. Its cost: matrix products are linear in the tokens, padding included; attention is
    quadratic in the length of each sample."""

    indices: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: int = 0

    def growth(self, length: int, *, pack: bool) -> int:
        """Tokens that a sample of this length would add. Unpacked, all rows are as long as the first, longest sample."""
        return length if pack or not self.indices else self.tokens // len(self.indices)

    def add(self, index: int, growth: int, length: int) -> None:
        self.indices.append(index)
        self.tokens += growth
        self.cost += growth * _ATTENTION_BREAK_EVEN_TOKENS + length**2

    def plan(self, *, pack: bool) -> MicroBatchPlan:
        if not self.indices:
            return MicroBatchPlan(rows=[], row_tokens=EMPTY_ROW_TOKENS)
        rows = [self.indices] if pack else [[index] for index in self.indices]
        return MicroBatchPlan(rows=rows, row_tokens=self.tokens // len(rows))


def plan_batch(lengths: Sequence[int], *, world_size: int, micro_batch_tokens: int, pack: bool) -> BatchPlan:
    """Plan one optimizer update of samples with these `lengths`. [num_samples]

    Args:
        micro_batch_tokens: maximum number of tokens (padding included) of one forward on one rank.
        pack: False puts one sample into each row; rows are as long as the longest sample of their micro-batch."""
    if not lengths:
        raise ValueError("a step needs at least one sample")
    longest = max(lengths)
    if longest > micro_batch_tokens:
        raise ValueError(
            f"a sample of {longest} tokens does not fit into training.micro_batch_tokens = {micro_batch_tokens}"
        )
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    first_fit = _first_fit(order, lengths, micro_batch_tokens, pack=pack)
    first_fit += [_Bin() for _ in range(-len(first_fit) % world_size)]
    bins = _fill_evenly(order, lengths, len(first_fit), micro_batch_tokens, pack=pack) or first_fit
    return BatchPlan(ranks=[[each.plan(pack=pack) for each in rank] for rank in _distribute(bins, world_size)])


def _first_fit(order: Sequence[int], lengths: Sequence[int], limit: int, *, pack: bool) -> list[_Bin]:
    """Put samples, longest first, each into the first micro-batch with room, or else into a new one."""
    bins: list[_Bin] = []
    room = np.full(len(lengths) + 1, limit)  # of each micro-batch, existing or not
    for index in order:
        length = lengths[index]
        number = int((room[: len(bins) + 1] >= length).argmax())
        if number == len(bins):
            bins.append(_Bin())
            if not pack:
                room[number] -= limit % length  # only whole rows, all as long as this one
        growth = bins[number].growth(length, pack=pack)
        bins[number].add(index, growth, length)
        room[number] -= growth
    return bins


def _fill_evenly(
    order: Sequence[int], lengths: Sequence[int], count: int, limit: int, *, pack: bool
) -> list[_Bin] | None:
    """Put samples, longest first, each into the cheapest of `count` micro-batches with room; None if a sample finds no room."""
    bins = [_Bin() for _ in range(count)]
    shortest = lengths[order[-1]]
    by_cost = [(0, number) for number in range(count)]  # heap
    for index in order:
        length = lengths[index]
        without_room = []
        while by_cost:
            cheapest = bins[by_cost[0][1]]
            growth = cheapest.growth(length, pack=pack)
            if cheapest.tokens + growth <= limit:
                break
            without_room.append(heapq.heappop(by_cost))
        else:
            return None
        cheapest.add(index, growth, length)
        heapq.heapreplace(by_cost, (cheapest.cost, by_cost[0][1]))
        for each in without_room:
            if bins[each[1]].tokens + shortest <= limit:  # a shorter sample may fit
                heapq.heappush(by_cost, each)
    return bins


def _distribute(bins: Sequence[_Bin], world_size: int) -> list[list[_Bin]]:
    """Assign micro-batches of similar cost to different ranks at the same time, the most expensive first. Returns each rank's."""
    ranks: list[list[_Bin]] = [[] for _ in range(world_size)]
    costs = [0] * world_size
    ordered = sorted(bins, key=lambda each: -each.cost)
    for start in range(0, len(ordered), world_size):
        cheapest_first = sorted(range(world_size), key=lambda rank: costs[rank])
        for rank, each in zip(cheapest_first, ordered[start : start + world_size], strict=True):
            ranks[rank].append(each)
            costs[rank] += each.cost
    return ranks
