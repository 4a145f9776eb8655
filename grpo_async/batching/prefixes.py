"""The prefix tree of samples, for tree packing: what they share is computed once, whoever made them (the prompt of a group, the
history of an agent's calls). Sorted by their token ids, samples with a common prefix are neighbors, in the order of a depth-first
walk through the tree.

Samples [1 2 5], [9], [1 2 6 7] -> order [0, 2, 1], shared [0, 2, 0]: the third needs only its last two tokens computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from grpo_async.records import IntArray


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """S samples in the order of their token ids."""

    order: NDArray[np.int64]  # (S,), index of the sample at each place
    shared: NDArray[np.int64]  # (S,), first tokens that it has in common with the one before it; 0 at the first place

    @classmethod
    def without_sharing(cls, num_samples: int) -> PrefixOrder:
        return cls(np.arange(num_samples), np.zeros(num_samples, np.int64))

    def between(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """`shared` if only the samples at these ascending places were there. (n,) -> (n,)"""
        shared = np.zeros(len(places), np.int64)
        if len(places) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return shared


def prefix_order(token_ids: Sequence[IntArray]) -> PrefixOrder:
    """Sort samples by their token ids. [num_samples]"""
    keys = [ids.astype(">u4").tobytes() for ids in token_ids]  # big-endian: the order of bytes is that of numbers
    order = sorted(range(len(keys)), key=lambda index: (keys[index], index))
    shared = [0, *(_common(token_ids[a], token_ids[b]) for a, b in pairwise(order))]
    return PrefixOrder(np.array(order, np.int64), np.array(shared[: len(order)], np.int64))


def _common(first: IntArray, second: IntArray) -> int:
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
