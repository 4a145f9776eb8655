"""Divides the groups of a step into minibatches, one for each optimizer update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_async.records import RolloutSample, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """Whole groups, so that advantages of one group stay together. Each has samples to train."""

    groups: Sequence[ScoredGroup]

    @property
    def samples(self) -> list[RolloutSample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def num_masked(self) -> int:
        """Completions that were scored and are not trained (rollout.overlong: mask). They count in means over samples."""
        return sum(len(group.rewards) - len({sample.root_id for sample in group.samples}) for group in self.groups)


def split_groups(groups: Sequence[ScoredGroup], num_minibatches: int) -> list[Minibatch]:
    """The groups that have samples, in their order, in parts that differ by one group at most. Fewer parts where there are fewer
    groups.

    Worked example: groups [a, b, c, d, e] in 2 -> [a, b, c], [d, e]; in 8 -> five parts of one group.
    """
    trained = [group for group in groups if group.samples]
    count = min(num_minibatches, len(trained))
    size, longer = divmod(len(trained), max(count, 1))
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [Minibatch(groups=trained[start:stop]) for start, stop in pairwise(starts)]
