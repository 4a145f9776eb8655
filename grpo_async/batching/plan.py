"""Decides which sample goes into which row, micro-batch and rank. Pure: works on lengths and shared prefixes alone.

The samples of a micro-batch go into one row, each distinct prefix once and nothing padded (training/attention.py keeps them
apart). Every rank gets the same number of micro-batches, as many as first-fit by decreasing length needs; the m-th ones of all
ranks run at the same time, so samples go, longest first, each into the cheapest one with room, and neighbors by cost run together.

Lengths [5, 3, 4, 2], 2 ranks, 8 tokens per micro-batch: first-fit needs two. By cost, 5 and 4 go into one each, 3 joins the 4, 2
joins the 5 -> rank 0 has a row of samples [0, 3], rank 1 one of [1, 2].

Samples with a long prefix in common move as one. Whether it is better to keep them together or to cut them, so that the ranks
have the same to do, is seen by planning several sizes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grpo_async.batching.prefixes import PrefixOrder

EMPTY_ROW_TOKENS = 4
"""Padding tokens of a micro-batch without samples. It runs a forward for FSDP's collectives; it has more than one token because
torch.compile would generate separate code for one."""
_ATTENTION_BREAK_EVEN_TOKENS = 16_384
"""Sample length above which attention costs more than matrix products. In a layer of the usual shape the latter take 24 h^2
operations per token and causal attention 2 h L: they are equal at 12 h, 12,288 tokens for a hidden size of 1024. A plan
knows only lengths."""
_WORTH_KEEPING = 8
"""Neighbors are kept together only if they share more than this part, 1/8, of the shorter one: a system prompt that all samples
begin with does not hold a whole step together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    rows: Sequence[Sequence[int]]
    """Indices of the samples in each row; none where the rank has nothing to do."""
    row_tokens: int
    """Length of a row, which is that of the longest one."""
    shared: Sequence[int] = ()
    """Of each sample of `indices`: its first tokens that are those of the sample before it, and are not computed again. Empty: none
    are shared."""

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

    def attention_pairs(self, lengths: Sequence[int]) -> int:
        """Pairs of a query that is computed and a key that it sees, in samples of these lengths. [num_samples]"""
        total = sum(length * (length + 1) for length in lengths)
        shared = (prefix for rank in self.ranks for micro_batch in rank for prefix in micro_batch.shared)
        return (total - sum(prefix * (prefix + 1) for prefix in shared)) // 2

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of samples that are not computed again."""
        return sum(sum(micro_batch.shared) for rank in self.ranks for micro_batch in rank)


@dataclass(slots=True, eq=False)
class _Bin:
    """Samples that are computed together, by their places in the order of prefixes: a micro-batch, or what one is filled with.

    Its cost: matrix products are linear in the tokens, padding included; attention is quadratic in the length of each sample, less
    what a shared prefix saves."""

    places: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: int = 0

    def growth(self, tokens: int, *, pack: bool) -> int:
        """Tokens that a part of so many would add. Unpacked, all rows are as long as the first, longest sample."""
        return tokens if pack or not self.places else self.tokens // len(self.places)

    def add(self, part: _Bin, *, pack: bool) -> None:
        growth = self.growth(part.tokens, pack=pack)
        self.places += part.places
        self.tokens += growth
        self.cost += part.cost + (growth - part.tokens) * _ATTENTION_BREAK_EVEN_TOKENS


def plan_batch(
    lengths: Sequence[int],
    *,
    world_size: int,
    micro_batch_tokens: int,
    pack: bool,
    prefixes: PrefixOrder | None = None,
    row_multiple: int = 1,
) -> BatchPlan:
    """Plan one optimizer update of samples with these `lengths`. [num_samples]

    Args:
        micro_batch_tokens: maximum number of tokens (each shared prefix once, padding included) of one forward on one rank.
        pack: False puts one sample into each row; rows are as long as the longest sample of their micro-batch.
        prefixes: what the samples share; None: nothing.
        row_multiple: rows are padded to a multiple of so many tokens."""
    if not lengths:
        raise ValueError("a step needs at least one sample")
    longest = max(lengths)
    if longest > micro_batch_tokens:
        raise ValueError(
            f"a sample of {longest} tokens does not fit into training.micro_batch_tokens = {micro_batch_tokens}"
        )
    if prefixes is None or not pack:
        prefixes = PrefixOrder.without_sharing(len(lengths))
    tree = _Tree(np.asarray(lengths, np.int64)[prefixes.order], prefixes)
    plans = []
    for limit in tree.part_limits(world_size, micro_batch_tokens):
        bins = _bins(tree.parts(limit), world_size, micro_batch_tokens, pack=pack)
        plans.append(_distribute([tree.merged(each) for each in bins] if pack else bins, world_size))
    best = min(plans, key=_time)
    return BatchPlan(
        ranks=[[tree.micro_batch(each, pack=pack, row_multiple=row_multiple) for each in rank] for rank in best]
    )


class _Tree:
    """Costs of samples that are computed together. Places are those in the order of prefixes."""

    def __init__(self, lengths: NDArray[np.int64], prefixes: PrefixOrder) -> None:
        self._lengths, self._prefixes = lengths, prefixes  # lengths: (S,), by place

    def merged(self, each: _Bin) -> _Bin:
        """The same samples in the order of their prefixes, with the tokens and the cost of each distinct prefix once."""
        places = np.sort(np.array(each.places, np.int64))
        lengths, shared = self._lengths[places], self._prefixes.between(places)
        tokens = int((lengths - shared).sum())
        return _Bin(
            places.tolist(), tokens, tokens * _ATTENTION_BREAK_EVEN_TOKENS + int((lengths**2 - shared**2).sum())
        )

    def part_limits(self, world_size: int, micro_batch_tokens: int) -> list[int]:
        """The sizes of parts to try: whole micro-batches, and those that divide a step evenly among the ranks."""
        if not self._prefixes.shared.any():
            return [0]
        even = -(-self.merged(_Bin(list(range(len(self._lengths))))).tokens // world_size)
        sizes = (even * 3 // 2, even, even // 2, even // 4, 0)
        return [micro_batch_tokens, *(size for size in sizes if size < micro_batch_tokens)]

    def parts(self, limit: int) -> list[_Bin]:
        """Cut the samples, in the order of their prefixes, into parts: where neighbors share little, and where a part would have
        more than `limit` tokens."""
        lengths, shared = self._lengths.tolist(), self._prefixes.shared.tolist()
        parts: list[_Bin] = []
        for place, (length, prefix) in enumerate(zip(lengths, shared, strict=True)):
            is_weak = place == 0 or prefix * _WORTH_KEEPING <= min(length, lengths[place - 1])
            if is_weak or parts[-1].tokens + length - prefix > limit:
                parts.append(_Bin())
                prefix = 0
            part = parts[-1]
            part.places.append(place)
            part.tokens += length - prefix
            part.cost += (length - prefix) * _ATTENTION_BREAK_EVEN_TOKENS + length**2 - prefix**2
        return parts

    def micro_batch(self, each: _Bin, *, pack: bool, row_multiple: int) -> MicroBatchPlan:
        if not each.places:
            return MicroBatchPlan(rows=[], row_tokens=EMPTY_ROW_TOKENS * row_multiple)
        places = np.array(each.places, np.int64)
        indices = self._prefixes.order[places].tolist()
        rows = [indices] if pack else [[index] for index in indices]
        shared = self._prefixes.between(places).tolist() if pack else ()
        row_tokens = -(-each.tokens // len(rows) // row_multiple) * row_multiple
        return MicroBatchPlan(rows=rows, row_tokens=row_tokens, shared=shared)


def _time(ranks: Sequence[Sequence[_Bin]]) -> int:
    """Cost of the dearest micro-batch of those that run at the same time, summed."""
    return sum(max(each.cost for each in together) for together in zip(*ranks, strict=True))


def _bins(parts: Sequence[_Bin], world_size: int, limit: int, *, pack: bool) -> list[_Bin]:
    """Divide parts among micro-batches, whose number is a multiple of that of the ranks."""
    ordered = sorted(parts, key=lambda part: (-part.tokens, part.places))
    first_fit = _first_fit(ordered, limit, pack=pack)
    first_fit += [_Bin() for _ in range(-len(first_fit) % world_size)]
    return _fill_evenly(ordered, len(first_fit), limit, pack=pack) or first_fit


def _first_fit(ordered: Sequence[_Bin], limit: int, *, pack: bool) -> list[_Bin]:
    """Put parts, longest first, each into the first micro-batch with room, or else into a new one."""
    bins: list[_Bin] = []
    room = np.full(len(ordered) + 1, limit)  # of each micro-batch, existing or not
    for part in ordered:
        number = int((room[: len(bins) + 1] >= part.tokens).argmax())
        if number == len(bins):
            bins.append(_Bin())
            if not pack:
                room[number] -= limit % part.tokens  # only whole rows, all as long as this one
        room[number] -= bins[number].growth(part.tokens, pack=pack)
        bins[number].add(part, pack=pack)
    return bins


def _fill_evenly(ordered: Sequence[_Bin], count: int, limit: int, *, pack: bool) -> list[_Bin] | None:
    """Put parts, longest first, each into the cheapest of `count` micro-batches with room; None if one finds no room."""
    bins = [_Bin() for _ in range(count)]
    shortest = ordered[-1].tokens
    by_cost = [(0, number) for number in range(count)]  # heap
    for part in ordered:
        without_room = []
        while by_cost:
            cheapest = bins[by_cost[0][1]]
            if cheapest.tokens + cheapest.growth(part.tokens, pack=pack) <= limit:
                break
            without_room.append(heapq.heappop(by_cost))
        else:
            return None
        cheapest.add(part, pack=pack)
        heapq.heapreplace(by_cost, (cheapest.cost, by_cost[0][1]))
        for each in without_room:
            if bins[each[1]].tokens + shortest <= limit:  # a shorter part may fit
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
