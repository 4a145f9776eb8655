"""Rules of evaluation and of the checkpoints that are kept by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig


def conflicts(config: ExperimentConfig) -> Iterator[str]:
    """What does not go together."""
    evaluation = config.evaluation
    if evaluation is not None and evaluation.samples > 1 and evaluation.temperature == 0:
        yield (
            f"evaluation.samples: {evaluation.samples} greedy completions of a prompt are all the same; set "
            "evaluation.temperature, or samples: 1"
        )
    if config.checkpoint.keep_best and (evaluation is None or evaluation.every_steps is None):
        yield (
            f"checkpoint.keep_best: {config.checkpoint.keep_best} goes by evaluations during training, and there are none; set "
            "evaluation.every_steps"
        )
