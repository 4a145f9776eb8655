"""Processes and machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_async.config.base import StrictModel


class SlurmSection(StrictModel):
    """What `grpo-async launch slurm` writes into the batch script; everything may stay empty."""

    partition: str | None = None
    """`--partition`."""
    account: str | None = None
    """`--account`."""
    time: str | None = None
    """`--time`, such as 12:00:00. The run is told to stop in time, saves, and is submitted again with --resume."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """`--gpus-per-node`; null = what trainer and servers of a node need."""
    server_nodes: int = Field(default=1, ge=1)
    """Machines for inference servers, beside `launch.nodes` for the trainer."""
    options: list[str] = Field(default_factory=list)
    """Further `#SBATCH` options as they are, such as `--exclusive`."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines before anything is started, such as `module load cuda`."""


class LaunchSection(StrictModel):
    num_trainer_ranks: int = Field(default=1, ge=1)
    """Trainer processes of this machine under torchrun, one per GPU (or any number on CPU)."""
    nodes: int = Field(default=1, ge=1)
    """Machines that train; on each of them `grpo-async train` is started, with its own --node-rank."""
    rdzv: str | None = None
    """`host:port` of the machine with node rank 0, where the others meet it; needed with more than one node."""
    sharding: Literal["full", "hybrid"] = "full"
    """full: parameters are sharded over all ranks. hybrid: over the ranks of a machine, and replicated over machines (HSDP)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto = cuda where there is one."""
    trainer_threads: int = Field(default=1, ge=1)
    """CPU threads of each trainer rank."""
    stop_timeout_s: float = Field(default=60.0, gt=0.0)
    """Time the trainer has to checkpoint and end after SIGINT / SIGTERM; then it is killed."""
    slurm: SlurmSection = SlurmSection()
    """For `grpo-async launch slurm`."""
