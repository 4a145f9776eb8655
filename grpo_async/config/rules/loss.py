"""Rules of the objective: losses, corrections, advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpo_async.config.loss_sections import CustomLoss, GspoLoss

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig


def conflicts(config: ExperimentConfig) -> Iterator[str]:
    """What does not go together."""
    loss, num_minibatches, groups_per_step = config.loss, config.training.minibatches, config.rollout.groups_per_step
    if num_minibatches > groups_per_step:
        yield (
            f"training.minibatches: {num_minibatches} is more than rollout.groups_per_step: {groups_per_step}; a group is trained "
            "in one update, so there can be at most as many updates as groups"
        )
    yield from _proximal_conflicts(config)
    if loss.correction is not None and isinstance(loss, GspoLoss) and loss.correction.level == "token":
        yield (
            "loss.correction.level: token would weigh tokens of one sample differently, and gspo's ratio is the same for all of "
            "them; set level: sequence"
        )
    if loss.beta == 0.0 and loss.reference != "initial":
        yield (
            f"loss.reference: {loss.reference} would not be used, since loss.beta is 0 and there is no KL; set loss.beta, or leave "
            "the reference out"
        )


def _proximal_conflicts(config: ExperimentConfig) -> Iterator[str]:
    loss, num_minibatches = config.loss, config.training.minibatches
    if loss.proximal == "sampler" and loss.correction is not None:
        yield (
            "loss.correction: weighs the difference between sampler and proximal policy, and with loss.proximal: sampler there is "
            "none; set loss.proximal: recomputed, or leave the correction out"
        )
    if loss.proximal == "log_linear" and config.rollout.max_staleness == 0:
        yield (
            "loss.proximal: log_linear goes by the age of tokens, and with rollout.max_staleness: 0 all are new, so it would be "
            "the sampler itself; set sampler or recomputed"
        )
    has_use = loss.correction is not None or num_minibatches > 1 or isinstance(loss, CustomLoss)
    if loss.proximal == "recomputed" and not has_use:
        yield (
            "loss.proximal: recomputed makes every ratio 1 while training.minibatches is 1, and without loss.correction nothing "
            "else tells sampler and trainer apart: no clip would act, stale tokens would count as new ones; add a correction, or "
            "leave proximal out"
        )
