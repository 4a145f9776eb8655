"""Decides which sample goes into which row, micro-batch and rank. Pure: works on lengths alone.

Attention goes sample by sample wherever a sample stands (training/attention.py), so the samples of a micro-batch stand in one row,
one after the other, and nothing is padded. Every rank gets the same number of micro-batches, because the collectives of FSDP run
in lockstep. The m-th ones of all ranks run at the same time, and all wait for the most expensive of them.

There are as few micro-batches as first-fit by decreasing length needs. Samples go, longest first, each into the cheapest one that
still has room (where that leaves one without: as first-fit had them). Micro-batches then are sorted by cost: neighbours run at the
same time, and of them the rank with the least work so far gets the most expensive one.

Worked example: lengths [5, 3, 4, 2], 2 ranks, 8 tokens per micro-batch. First-fit needs two, 5 + 3 and 4 + 2: one a rank. The
cheapest ones: 5 and 4 go into one each, 3 to the 4, 2 to the 5 -> rank 0 has a row of samples [0, 3], rank 1 one of [2, 1].

A prompt that several samples begin with is computed once in each micro-batch that has them: the first of them stands in the row
whole, the others without the prompt. So such samples are filled in group by group, each where its prompt is already, or where that
is full, where there is room. Between ranks groups are divided as far as an even cost needs: the least limit of cost is searched
with which there are no more micro-batches than without one. A sample whose prompt is not worth it stands whole, and a plan that
would take longer than the one above is not taken.

Worked example: 8 samples of 3 + 2 tokens, 4 with one prompt and 4 with another, 1 rank, 12 tokens per micro-batch. In the first
3 + 2 + 2 + 2 + 2 = 11 tokens, in the second as many: two micro-batches of 11 tokens, where alone 40 tokens would need four.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

EMPTY_ROW_TOKENS = 4
"""Padding that a micro-batch without a sample computes: a forward for FSDP's collectives, and more than one token, for which
torch.compile would make code of its own."""
_EVEN_TOKENS = 16_384
"""Length of a sample from which on attention costs more than matrix products. In a layer of the usual shape the latter are 24 h^2
operations a token and causal attention 2 h L: even at 12 h, 12,288 tokens for a hidden size of 1024. A plan knows lengths only."""

_FORWARD_COST = 64 * _EVEN_TOKENS
"""Of a micro-batch beside that of its tokens (launches of kernels, weights that are gathered): a guess, for plans that differ
little."""
_HALVINGS = 6  # of the range in which the least limit of cost is searched: to 1/64 of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrompt:
    """What a sample has in common with others: its first `num_tokens` tokens. Equal prompts have equal numbers."""

    number: int
    num_tokens: int  # at least 1, and less than the sample has


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """One forward of one rank."""

    rows: Sequence[Sequence[int]]
    """Indices of the samples in each row; none where the rank has nothing to do."""
    row_tokens: int
    """Length of a row: that of the longest one."""
    continues: Mapping[int, int] = field(default_factory=dict)
    """Sample -> the one before it in its row after whose prompt it goes on, having none of its own."""
    num_shared_tokens: int = 0
    """Tokens that its samples have and that are not computed for them, but for one before."""

    @property
    def indices(self) -> list[int]:
        """Of all its samples, in the order in which they are packed."""
        return [index for row in self.rows for index in row]

    @property
    def num_computed_tokens(self) -> int:
        """Rows x their length, padding included; without a sample one row of it."""
        return max(1, len(self.rows)) * self.row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`ranks[r][m]` is what rank r computes as its m-th forward; every rank has as many."""

    ranks: Sequence[Sequence[MicroBatchPlan]]

    @property
    def num_micro_batches(self) -> int:
        """Of each rank."""
        return len(self.ranks[0])

    @property
    def num_computed_tokens(self) -> int:
        """Of all forwards on all ranks, padding included."""
        return sum(micro_batch.num_computed_tokens for rank in self.ranks for micro_batch in rank)

    @property
    def num_shared_tokens(self) -> int:
        """What less is computed, because samples have prompts in common."""
        return sum(micro_batch.num_shared_tokens for rank in self.ranks for micro_batch in rank)


@dataclass(slots=True, eq=False)
class _Filling:
    """A micro-batch while samples are put into it. Its cost: matrix products are linear in the tokens, padding included;
    attention is quadratic in the length of each sample."""

    indices: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: int = 0
    first_of: dict[int, int] = field(default_factory=dict)  # number of a prompt -> the sample that brought it
    continues: dict[int, int] = field(default_factory=dict)
    shared: int = 0

    def growth(self, length: int, *, pack: bool) -> int:
        """Tokens that it had more with a sample of this length. Unpacked, all rows are as long as its first, longest sample."""
        return length if pack or not self.indices else self.tokens // len(self.indices)

    def add(self, index: int, growth: int, squares: int) -> None:
        self.indices.append(index)
        self.tokens += growth
        self.cost += _cost(growth, squares)


def _cost(tokens: int, squares: int) -> int:
    return tokens * _EVEN_TOKENS + squares


def _squares(length: int, known: int) -> int:
    """Attention of a sample whose first `known` tokens are computed elsewhere. Its other queries attend to those, too, so only
    their square is saved; and the forward pass of what is left, a third of a step's attention, is made once more in the backward
    pass (training/attention.py)."""
    return length**2 if not known else (length**2 - known**2) * 4 // 3


def _pays(length: int, prompt: SamplePrompt) -> bool:
    """Whether a sample costs less without its prompt: not where a long completion follows a short one."""
    known = prompt.num_tokens
    return _cost(length - known, _squares(length, known)) < _cost(length, length**2)


def plan_batch(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    pack: bool,
    prompts: Sequence[SamplePrompt | None] | None = None,
) -> BatchPlan:
    """Plan one optimizer update.

    Args:
        lengths: tokens of each sample. [num_samples]
        prompts: those of samples that begin alike (batching.prompts), which are computed once; None: nothing is. Only where samples
            are packed. [num_samples]
        micro_batch_tokens: most tokens (padding included) of one forward on one rank.
        pack: False puts one sample into each row; rows are as long as the longest sample of their micro-batch.

    Raises:
        ValueError: no samples, a sample longer than a micro-batch, or prompts of samples that are not packed.
    """
    if not lengths:
        raise ValueError("a step needs at least one sample")
    longest = max(lengths)
    if longest > micro_batch_tokens:
        raise ValueError(
            f"a sample of {longest} tokens does not fit into training.micro_batch_tokens = {micro_batch_tokens}"
        )
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    first_fit = _first_fit(order, lengths, micro_batch_tokens, pack=pack)
    first_fit += [_Filling() for _ in range(-len(first_fit) % num_ranks)]
    filled = _fill_evenly(order, lengths, len(first_fit), micro_batch_tokens, pack=pack) or first_fit
    ranks = _distribute(filled, num_ranks)
    if prompts is not None and any(prompts):
        if not pack:
            raise ValueError("samples have prompts in common only where they are packed")
        paying = [
            prompt if prompt is not None and _pays(length, prompt) else None
            for length, prompt in zip(lengths, prompts, strict=True)
        ]
        if any(paying):
            sharing = _distribute(_fill_sharing(lengths, paying, num_ranks, micro_batch_tokens), num_ranks)
            ranks = min(sharing, ranks, key=_duration)
    return BatchPlan(ranks=[[_planned(each, pack=pack) for each in rank] for rank in ranks])


def _duration(ranks: Sequence[Sequence[_Filling]]) -> int:
    """What the ranks take together, in units of cost: each m-th micro-batch as long as the most expensive of them."""
    return sum(_FORWARD_COST + max(each.cost for each in at_once) for at_once in zip(*ranks, strict=True))


def _first_fit(order: Sequence[int], lengths: Sequence[int], limit: int, *, pack: bool) -> list[_Filling]:
    """Samples, longest first, each into the first micro-batch that has room, else into a new one."""
    filled: list[_Filling] = []
    room = np.full(len(lengths) + 1, limit)  # of each micro-batch, and of those to come
    for index in order:
        length = lengths[index]
        number = int((room[: len(filled) + 1] >= length).argmax())
        if number == len(filled):
            filled.append(_Filling())
            if not pack:
                room[number] -= limit % length  # only whole rows, all as long as this one
        growth = filled[number].growth(length, pack=pack)
        filled[number].add(index, growth, length**2)
        room[number] -= growth
    return filled


def _fill_evenly(
    order: Sequence[int], lengths: Sequence[int], count: int, limit: int, *, pack: bool
) -> list[_Filling] | None:
    """Samples, longest first, each into the cheapest of `count` micro-batches with room; None where there was none."""
    filled = [_Filling() for _ in range(count)]
    shortest = lengths[order[-1]]
    by_cost = [(0, number) for number in range(count)]  # heap
    for index in order:
        length = lengths[index]
        without_room = []
        while by_cost:
            cheapest = filled[by_cost[0][1]]
            growth = cheapest.growth(length, pack=pack)
            if cheapest.tokens + growth <= limit:
                break
            without_room.append(heapq.heappop(by_cost))
        else:
            return None
        cheapest.add(index, growth, length**2)
        heapq.heapreplace(by_cost, (cheapest.cost, by_cost[0][1]))
        for each in without_room:
            if filled[each[1]].tokens + shortest <= limit:  # a shorter sample may fit
                heapq.heappush(by_cost, each)
    return filled


def _fill_sharing(
    lengths: Sequence[int], prompts: Sequence[SamplePrompt | None], num_ranks: int, limit: int
) -> list[_Filling]:
    """As few micro-batches as first-fit needs, a multiple of `num_ranks`; even ones where there are several ranks."""
    order = _group_by_group(lengths, prompts)
    samples = [_Sharing.of(index, lengths[index], prompts[index]) for index in order]
    best = _first_fit_sharing(samples, limit)
    count = -(-len(best) // num_ranks) * num_ranks
    low = max(_cost(length, length**2) for length in lengths)  # each fits into an empty one
    high = max(each.cost for each in best)
    total = sum(sample.behind[2] for sample in samples)  # at least, whoever brings the prompts
    for _ in range(_HALVINGS if num_ranks > 1 else 0):  # ranks wait for each other; one after the other nobody waits
        middle = (low + high) // 2
        found = _first_fit_sharing(samples, limit, most_cost=middle, most=count) if middle * count >= total else []
        if 0 < len(found) <= count:
            best, high = found, middle
        else:
            low = middle
    return best + [_Filling() for _ in range(count - len(best))]


class _Sharing(NamedTuple):
    """A sample, what it adds to a micro-batch (tokens, squares, cost), and what it adds to one that has its prompt."""

    sample_index: int
    prompt: SamplePrompt | None
    alone: tuple[int, int, int]
    behind: tuple[int, int, int]

    @classmethod
    def of(cls, index: int, length: int, prompt: SamplePrompt | None) -> _Sharing:
        known = 0 if prompt is None else prompt.num_tokens
        tokens = [(length, length**2), (length - known, _squares(length, known))]
        alone, behind = ((each, squares, _cost(each, squares)) for each, squares in tokens)
        return cls(index, prompt, alone, behind)


def _first_fit_sharing(
    samples: Sequence[_Sharing], limit: int, *, most_cost: float = math.inf, most: float = math.inf
) -> list[_Filling]:
    """Each sample into the first micro-batch with its prompt and room, else into the first with room for both, else a new one. With
    more than `most` of them it is given up, and lacks samples."""
    filled: list[_Filling] = []
    open_ones: list[_Filling] = []  # the others have room for no sample
    open_with_prompt: defaultdict[int, list[_Filling]] = defaultdict(list)  # by the prompt's number
    least = min(sample.behind[0] for sample in samples)
    for index, prompt, alone, behind in samples:
        target = None
        if prompt is not None:
            tokens, squares, cost = behind
            for each in open_with_prompt[prompt.number]:
                if each.tokens + tokens <= limit and each.cost + cost <= most_cost:
                    target = each
                    target.continues[index] = target.first_of[prompt.number]
                    target.shared += prompt.num_tokens
                    break
        if target is None:
            tokens, squares, cost = alone
            for each in open_ones:
                if each.tokens + tokens <= limit and each.cost + cost <= most_cost:
                    target = each
                    break
            else:
                target = _Filling()
                filled.append(target)
                open_ones.append(target)
                if len(filled) > most:
                    break
            if prompt is not None:
                target.first_of[prompt.number] = index
                open_with_prompt[prompt.number].append(target)
        target.add(index, tokens, squares)
        if target.tokens + least > limit or target.cost + _cost(least, 0) > most_cost:
            open_ones.remove(target)
            for number in target.first_of:
                open_with_prompt[number].remove(target)
    return filled


def _group_by_group(lengths: Sequence[int], prompts: Sequence[SamplePrompt | None]) -> list[int]:
    """Samples with one prompt one after the other, the longest first; the groups with the most tokens first. [num_samples]"""
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        groups[(1, index) if prompt is None else (0, prompt.number)].append(index)
    ordered = sorted(groups.values(), key=lambda group: (-sum(lengths[index] for index in group), group[0]))
    return [index for group in ordered for index in sorted(group, key=lambda index: (-lengths[index], index))]


def _distribute(filled: Sequence[_Filling], num_ranks: int) -> list[list[_Filling]]:
    """Those of like cost to different ranks at the same time, the most expensive first. [num_ranks][num_micro_batches]"""
    ranks: list[list[_Filling]] = [[] for _ in range(num_ranks)]
    costs = [0] * num_ranks
    ordered = sorted(filled, key=lambda each: -each.cost)
    for start in range(0, len(ordered), num_ranks):
        cheapest_first = sorted(range(num_ranks), key=lambda rank: costs[rank])
        for rank, each in zip(cheapest_first, ordered[start : start + num_ranks], strict=True):
            ranks[rank].append(each)
            costs[rank] += each.cost
    return ranks


def _planned(filled: _Filling, *, pack: bool) -> MicroBatchPlan:
    indices = filled.indices
    if not indices:
        return MicroBatchPlan(rows=[], row_tokens=EMPTY_ROW_TOKENS)
    rows = [indices] if pack else [[index] for index in indices]
    return MicroBatchPlan(
        rows=rows,
        row_tokens=filled.tokens // len(rows),
        continues=filled.continues,
        num_shared_tokens=filled.shared,
    )
