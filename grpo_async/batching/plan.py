"""Decides which sample goes into which row, micro-batch and rank. Pure: works on lengths alone.

Rows have one length; samples are packed into them first-fit by decreasing length. Rows go to ranks longest cost first, each to
the cheapest rank that still has room; the cost of a row is the sum of its squared sample lengths (attention). Every rank gets
the same number of micro-batches, because the collectives of FSDP run in lockstep; a missing row stays empty.
Worked example: lengths [5, 3, 4, 2], row_tokens 8, 1 rank, 16 tokens per micro-batch -> rows [[0, 1], [2, 3]], one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`ranks[r][m]` is a list of rows, each a list of sample indices; every rank has as many micro-batches."""

    row_tokens: int
    ranks: Sequence[Sequence[Sequence[Sequence[int]]]]

    @property
    def num_micro_batches(self) -> int:
        return len(self.ranks[0])

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of all forwards, padding included; a micro-batch without a sample computes one row of it."""
        return sum(max(1, len(rows)) for micro_batches in self.ranks for rows in micro_batches) * self.row_tokens


def plan_batch(
    lengths: Sequence[int], *, num_ranks: int, micro_batch_tokens: int, row_tokens: int | None, pack: bool
) -> BatchPlan:
    """Plan one optimizer step.

    Args:
        lengths: tokens of each sample. [num_samples]
        micro_batch_tokens: most tokens (padding included) of one forward on one rank.
        row_tokens: tokens of a row; None or less than the longest sample = the longest sample.
        pack: False puts one sample into each row.

    Raises:
        ValueError: no samples, or a sample longer than a micro-batch.
    """
    if not lengths:
        raise ValueError("a step needs at least one sample")
    longest = max(lengths)
    if longest > micro_batch_tokens:
        raise ValueError(
            f"a sample of {longest} tokens does not fit into training.micro_batch_tokens = {micro_batch_tokens}"
        )
    row_length = max(longest, row_tokens or 0)
    rows = _fill_rows(lengths, row_length) if pack else [[index] for index in range(len(lengths))]
    rows_per_micro_batch = max(1, micro_batch_tokens // row_length)
    rows_per_rank = -(-len(rows) // num_ranks)
    num_micro_batches = -(-rows_per_rank // rows_per_micro_batch)
    ranks = []
    for rank_rows in _balance(rows, lengths, num_ranks, rows_per_rank):
        # spread evenly, so that the last micro-batch is not a small remainder
        ranks.append([rank_rows[number::num_micro_batches] for number in range(num_micro_batches)])
    return BatchPlan(row_tokens=row_length, ranks=ranks)


def _fill_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row, left in enumerate(room):
            if lengths[index] <= left:
                rows[row].append(index)
                room[row] -= lengths[index]
                break
        else:
            rows.append([index])
            room.append(row_length - lengths[index])
    return rows


def _balance(
    rows: Sequence[list[int]], lengths: Sequence[int], num_ranks: int, rows_per_rank: int
) -> list[list[list[int]]]:
    def cost(row: Sequence[int]) -> int:
        return sum(lengths[index] ** 2 for index in row)

    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    costs = [0] * num_ranks
    for row in sorted(rows, key=cost, reverse=True):
        open_ranks = [rank for rank in range(num_ranks) if len(ranks[rank]) < rows_per_rank]
        cheapest = min(open_ranks, key=lambda rank: (costs[rank], rank))
        ranks[cheapest].append(row)
        costs[cheapest] += cost(row)
    return ranks
