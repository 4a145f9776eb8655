"""Rules of evaluation and of the checkpoints that are kept by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig


def _metrics(samples: int) -> list[str]:
    """Metrics of an evaluation with so many completions of a prompt in which larger is better (rollout.evaluation_metrics)."""
    several = [f"mean@{samples}", "answered"] if samples > 1 else []
    powers = [k for k in (1 << n for n in range(21)) if k <= samples]
    return ["reward", *(f"pass@{k}" for k in powers), *(f"majority@{k}" for k in powers if k > 2), *several]


def conflicts(config: ExperimentConfig) -> Iterator[str]:
    """What does not go together."""
    evaluation = config.evaluation
    metric, samples = config.checkpoint.best_metric, evaluation.samples if evaluation is not None else 1
    known = _metrics(samples)
    if metric.partition("/")[0] not in (*known, "rewards"):
        yield (
            f"checkpoint.best_metric: an evaluation has no {metric!r} in which larger is better; it has {', '.join(known)} and "
            "rewards/NAME"
        )
    if evaluation is not None and evaluation.samples > 1 and evaluation.temperature == 0:
        yield (
            f"evaluation.samples: {evaluation.samples} greedy completions of a prompt are all the same; set "
            "evaluation.temperature, or samples: 1"
        )
    every = None if evaluation is None else evaluation.every_steps
    if every is not None and every % config.training.weight_sync_steps:
        yield (
            f"evaluation.every_steps: {every} is no multiple of training.weight_sync_steps: "
            f"{config.training.weight_sync_steps}, so the servers would be asked about a step whose weights they have not got; "
            "make it one"
        )
    if every is not None and config.inference.vllm.sleep_while_training:
        yield (
            f"evaluation.every_steps: {every} needs the servers while training goes on, and "
            "inference.vllm.sleep_while_training puts them to sleep then; leave one of them out"
        )
    for name, environment in config.environments.items():
        most = environment.max_instances
        if evaluation is not None and most is not None and most < evaluation.samples:
            yield (
                f"environments.{name}.max_instances: {most} is less than evaluation.samples: {evaluation.samples}; a prompt "
                "needs an instance for each of its completions"
            )
    if config.checkpoint.keep_best and every is not None and every % config.checkpoint.every_steps:
        yield (
            f"checkpoint.keep_best: {config.checkpoint.keep_best} keeps the checkpoints of steps that are evaluated, and not every "
            f"one of them has a checkpoint; make evaluation.every_steps: {every} a multiple of checkpoint.every_steps: "
            f"{config.checkpoint.every_steps}"
        )
    if config.checkpoint.keep_best and (evaluation is None or evaluation.every_steps is None):
        yield (
            f"checkpoint.keep_best: {config.checkpoint.keep_best} goes by evaluations during training, and there are none; set "
            "evaluation.every_steps"
        )
