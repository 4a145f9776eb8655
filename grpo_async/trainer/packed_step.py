"""The groups of one step, divided into minibatches, and each of these among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_async.batching.minibatch import Minibatch, split_groups, token_weights
from grpo_async.batching.pack import RankSamples, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config import ExperimentConfig
from grpo_async.records import ScoredGroup
from grpo_async.training.ranks import PackCommand
from grpo_async.training.token_statistics import TokenPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """What rank 0 knows of a step that all ranks have packed."""

    groups: Sequence[ScoredGroup]
    minibatches: Sequence[Minibatch]
    tokens: TokenPlan
    padding_fraction: float  # of the tokens that the ranks compute


def divide_step(
    groups: Sequence[ScoredGroup],
    config: ExperimentConfig,
    *,
    world_size: int,
    trainer_version: int,
    is_stored: Callable[[int], bool],
) -> tuple[PackedStep, list[PackCommand]]:
    """Divide the step. Returns it, and the part that each rank has to pack. [world_size]

    Args:
        groups: those that RolloutSource.take returned.
        trainer_version: finished steps when this one begins.
        is_stored: whether the rollout store keeps the statistics of the tokens of a group, by its id.
    """
    minibatches = split_groups(groups, config.training.minibatches)
    parts: list[list[RankSamples]] = []  # [num_minibatches][world_size]
    tokens = TokenPlan(world_size)
    num_tokens = num_computed = 0
    for minibatch in minibatches:
        samples = minibatch.samples
        plan = plan_batch(
            [len(sample.token_ids) for sample in samples],
            world_size=world_size,
            micro_batch_tokens=config.training.micro_batch_tokens,
            pack=config.training.pack,
        )
        weights = token_weights(
            samples,
            plan,
            reduction=config.loss.resolved_reduction,
            max_completion_tokens=config.rollout.max_completion_tokens,
            num_masked=minibatch.num_masked,
        )
        parts.append(split_by_rank(samples, weights, plan, trainer_version=trainer_version))
        num_tokens += sum(len(sample.token_ids) for sample in samples)
        num_computed += plan.num_computed_tokens
        stored = {group_id for group_id in {sample.group_id for sample in samples} if is_stored(group_id)}
        tokens.add(samples, plan, is_stored=[sample.group_id in stored for sample in samples])
    step = PackedStep(
        groups=groups, minibatches=minibatches, tokens=tokens, padding_fraction=1.0 - num_tokens / num_computed
    )
    return step, [PackCommand(minibatches=mine) for mine in zip(*parts, strict=True)]
