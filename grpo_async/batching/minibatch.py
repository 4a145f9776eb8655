"""Minibatches: the groups of a step divided into optimizer updates, and the weight of each token in the loss of one.

The loss of an update is  sum_t weight_t x loss_t  over all its micro-batches and ranks. The weights, and thus the common
denominator, are known before the first forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_async.batching.plan import BatchPlan
from grpo_async.config.sections import Reduction
from grpo_async.records import RolloutSample, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """Whole groups, so that the advantages of one group stay together. Each group has samples to train."""

    groups: Sequence[ScoredGroup]

    @property
    def samples(self) -> list[RolloutSample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def num_masked(self) -> int:
        """Completions that were scored but are not trained (rollout.overlong: mask). They count in means over samples."""
        return sum(len(group.rewards) - len({sample.root_id for sample in group.samples}) for group in self.groups)


def split_groups(groups: Sequence[ScoredGroup], num_minibatches: int) -> list[Minibatch]:
    """Split the groups that have samples, in their order, into parts that differ by at most one group.

    [a, b, c, d, e] in 2 -> [a, b, c], [d, e]; in 8 -> five parts of one group."""
    trained = [group for group in groups if group.samples]
    count = min(num_minibatches, len(trained))
    size, longer = divmod(len(trained), max(count, 1))
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [Minibatch(groups=trained[start:stop]) for start, stop in pairwise(starts)]


def token_weights(
    samples: Sequence[RolloutSample],
    plan: BatchPlan,
    *,
    reduction: Reduction,
    max_completion_tokens: int,
    num_masked: int = 0,
) -> list[float]:
    """Weight of each trained token of each sample of a minibatch. [num_samples]

    grpo (arXiv 2402.03300): 1 / (S x tokens of the completion), the mean over completions of their token means.
    dapo (arXiv 2503.14476): 1 / trained tokens of the minibatch.
    dr_grpo (arXiv 2503.20783): 1 / (S x max_completion_tokens).
    luspo (arXiv 2602.05261): 1 / S, the mean over completions of their token sums.
    bnpo (arXiv 2506.02864): 1 / (B x tokens of the sample's micro-batch), as TRL has it; with all in one micro-batch it is dapo.

    S counts completions, an agent's once whatever its branches, and the `num_masked` that were masked whole (rollout.overlong:
    mask): as in TRL they add 0 to the sum and 1 to the number. B counts the micro-batches of all ranks that have a trained
    token.

    Samples of 1 and 3 trained tokens: dapo [1/4, 1/4]; grpo [1/2, 1/6]; dr_grpo with 10: [1/20, 1/20]; bnpo in two micro-batches
    [1/2, 1/6]. With one more, masked: grpo [1/3, 1/9]. If both are branches of one completion: grpo [1/4, 1/4]."""
    counts = [sample.num_trained_tokens for sample in samples]
    tokens: Counter[str] = Counter()  # of each completion
    for sample, count in zip(samples, counts, strict=True):
        tokens[sample.root_id] += count
    num_completions = len(tokens) + num_masked
    match reduction:
        case "grpo":
            return [1.0 / (num_completions * max(tokens[sample.root_id], 1)) for sample in samples]
        case "dr_grpo":
            return [1.0 / (num_completions * max_completion_tokens)] * len(samples)
        case "luspo":
            return [1.0 / num_completions] * len(samples)
        case "dapo":
            return [1.0 / max(sum(counts), 1)] * len(samples)
        case "bnpo":
            return _micro_batch_weights(counts, plan)


def _micro_batch_weights(counts: Sequence[int], plan: BatchPlan) -> list[float]:
    micro_batches = [micro_batch.indices for rank in plan.ranks for micro_batch in rank]
    tokens = [sum(counts[index] for index in indices) for indices in micro_batches]
    num_filled = sum(count > 0 for count in tokens)
    weights = [0.0] * len(counts)
    for indices, count in zip(micro_batches, tokens, strict=True):
        for index in indices:
            weights[index] = 1.0 / (num_filled * count) if count else 0.0
    return weights
