"""Rules of models, memory and machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_async.config.experiment import ExperimentConfig


def conflicts(config: ExperimentConfig) -> Iterator[str]:
    """What does not go together."""
    launch, lora = config.launch, config.model.lora
    if launch.nodes > 1 and launch.rdzv is None:
        yield f"launch.rdzv: {launch.nodes} machines need a place to meet; set it to host:port of the one with node rank 0"
    if launch.sharding == "hybrid" and launch.nodes == 1:
        yield "launch.sharding: hybrid replicates over machines, and launch.nodes is 1; set full"
    if lora is not None and lora.push == "adapter" and lora.quantization is not None:
        yield (
            "model.lora.push: adapter adds to the weights that a server has loaded, and with model.lora.quantization the trainer "
            "trains on others, rounded to 4 bits; set push: merged"
        )
    if config.training.cpu_offload and launch.device == "cpu":
        yield "training.cpu_offload: with launch.device: cpu everything is in the machine's memory already; set it to false"
