"""Divides the groups of a step into minibatches, and each of these among the ranks, which pack their parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_async.batching.minibatch import Minibatch, split_groups, token_weights
from grpo_async.batching.pack import RankSamples, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.batching.prefixes import prefix_order
from grpo_async.config import ExperimentConfig
from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.rollout.source import RolloutSource
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.tracking.timeline import record
from grpo_async.training.ranks import PackCommand, TrainerContext
from grpo_async.training.token_statistics import TokenPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """What rank 0 knows of a step that all ranks have packed."""

    groups: Sequence[ScoredGroup]
    minibatches: Sequence[Minibatch]
    tokens: TokenPlan
    metrics: Mapping[str, float]  # of the tokens that the ranks compute
    attention_pairs: int

    def outcomes(self, trained: Sequence[bool]) -> dict[GroupStatus, list[ScoredGroup]]:
        """The groups by what became of them. `trained`: whether any update of each minibatch was made. [num_minibatches]"""
        outcomes: dict[GroupStatus, list[ScoredGroup]] = {
            GroupStatus.FILTERED: [group for group in self.groups if not group.samples],
            GroupStatus.TRAINED: [],
            GroupStatus.FAILED: [],
        }
        for minibatch, is_trained in zip(self.minibatches, trained, strict=True):
            outcomes[GroupStatus.TRAINED if is_trained else GroupStatus.FAILED] += minibatch.groups
        return outcomes


@dataclass(slots=True)
class Packer:
    """Has the ranks pack the samples of a step: ahead, while the step before it trains, or when the step begins."""

    context: TrainerContext
    source: RolloutSource
    store: RolloutStore
    _ahead: PackedStep | None = None

    def pack_next(self, step: int) -> None:
        """Called while the device computes the step before: pack the groups that `step` will train, if they are there."""
        config, groups = self.context.config, list[ScoredGroup]()
        if step <= config.num_steps:
            groups = self.source.reserve(config.rollout.groups_per_step, trainer_version=step - 1)
        if groups:
            self._ahead = self._pack(groups, step)
        else:
            self.context.channel.heartbeat()  # the other ranks wait for one command in every step

    def pack(self, groups: Sequence[ScoredGroup], step: int) -> PackedStep:
        """Pack the groups of `step`, unless just these were packed ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and [g.group_id for g in ahead.groups] == [g.group_id for g in groups]:
            return ahead
        return self._pack(groups, step)

    def _pack(self, groups: Sequence[ScoredGroup], step: int) -> PackedStep:
        context, began = self.context, time.time()
        has_stats = context.config.record.rollouts.token_stats
        packed, commands = divide_step(
            groups,
            context.config,
            world_size=context.world_size // context.config.training.context_parallel,
            pack=context.config.training.pack and not context.policy.one_sample_per_row,
            shares_prefixes=context.policy.shares_prefixes,
            trainer_version=step - 1,
            is_stored=lambda group_id: has_stats and self.store.stores(group_id, GroupStatus.TRAINED),
        )
        context.channel.send(commands)
        context.pack(commands[0])
        record("plan and pack", began, time.time(), step=step, rows=sum(len(group.samples) for group in groups))
        return packed


def divide_step(
    groups: Sequence[ScoredGroup],
    config: ExperimentConfig,
    *,
    world_size: int,
    pack: bool,
    shares_prefixes: bool,
    trainer_version: int,
    is_stored: Callable[[int], bool],
) -> tuple[PackedStep, list[PackCommand]]:
    """Divide the step. Returns it, and the part that each rank has to pack. `world_size`: ranks, or groups of those that compute
    together. `is_stored`: whether the rollout store keeps the statistics of the tokens of a group, by its id."""
    together = config.training.context_parallel
    minibatches = split_groups(groups, config.training.minibatches)
    parts: list[list[RankSamples]] = []  # [num_minibatches][world_size]
    tokens = TokenPlan(world_size)
    num_tokens = num_distinct = num_computed = pairs = 0
    for minibatch in minibatches:
        samples = minibatch.samples
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_batch(
            lengths,
            world_size=world_size,
            micro_batch_tokens=config.training.micro_batch_tokens * together,
            row_multiple=together,
            pack=pack,
            prefixes=prefix_order([sample.token_ids for sample in samples]) if shares_prefixes else None,
        )
        weights = token_weights(
            samples,
            plan,
            reduction=config.loss.resolved_reduction,
            max_completion_tokens=config.rollout.max_completion_tokens,
            num_masked=minibatch.num_masked,
        )
        parts.append(split_by_rank(samples, weights, plan, trainer_version=trainer_version))
        num_tokens += sum(lengths)
        num_distinct += sum(lengths) - plan.num_shared_tokens
        num_computed += plan.num_computed_tokens
        pairs += plan.attention_pairs(lengths)
        stored = {group_id for group_id in {sample.group_id for sample in samples} if is_stored(group_id)}
        tokens.add(samples, plan, is_stored=[sample.group_id in stored for sample in samples])
    step = PackedStep(
        groups=groups,
        minibatches=minibatches,
        tokens=tokens,
        metrics={
            "training/computed_tokens": float(num_computed),
            "training/shared_fraction": 1.0 - num_distinct / num_tokens,
            "training/padding_fraction": 1.0 - num_distinct / num_computed,
        },
        attention_pairs=pairs,
    )
    return step, [PackCommand(minibatches=part) for part in zip(*parts, strict=True) for _ in range(together)]
