"""Rules of the objective: losses, corrections, advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig


def conflicts(config: ExperimentConfig) -> Iterator[str]:
    """What does not go together."""
    loss = config.loss
    if loss.correction is not None and loss.proximal == "sampler":
        yield (
            "loss.correction: weighs the difference between sampler and proximal policy, and with loss.proximal: sampler there is "
            "none; set loss.proximal: recomputed, or leave the correction out"
        )
