"""Rules of models, memory and machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig


def conflicts(config: ExperimentConfig) -> Iterator[str]:
    """What does not go together."""
    launch = config.launch
    if launch.nodes > 1 and launch.rdzv is None:
        yield f"launch.rdzv: {launch.nodes} machines need a place to meet; set it to host:port of the one with node rank 0"
