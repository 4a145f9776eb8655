"""Processes and machines."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator

from grpo_async.config.base import Processes, Seconds, StrictModel

_Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,:+@-]+$")]
_Option = Annotated[str, StringConstraints(pattern=r"^--?[A-Za-z][^\n]*$")]
_Line = Annotated[str, StringConstraints(pattern=r"^[^\n]*$")]


class SlurmSection(StrictModel):
    """What `grpo-async launch slurm` writes into the batch script; everything may stay empty."""

    partition: _Word | None = None
    """`--partition`."""
    account: _Word | None = None
    """`--account`."""
    time: _Word | None = None
    """`--time`, such as 12:00:00. The run is told to stop in time, saves, and is put into the queue again to go on."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=1024)
    """`--gpus-per-node`; null = what the trainer or the servers of a machine need, whichever is more. 0: none."""
    server_nodes: Processes = 1
    """Machines for inference servers, beside `launch.nodes` for the trainer; each runs `inference.replicas` servers."""
    server_port: int = Field(default=8000, ge=1024, le=65000)
    """Port of the first server of a machine; the next ones follow."""
    options: list[_Option] = Field(default_factory=list)
    """Further `#SBATCH` options as they are, such as `--constraint=a100`; variables (${NAME}) are not replaced in them."""
    setup: list[_Line] = Field(default_factory=list)
    """Shell lines before anything is started, such as `module load cuda`. ${NAME} in them is a variable of the job, which its shell
    reads; it is not filled in when the script is written."""


class LaunchSection(StrictModel):
    num_trainer_ranks: Processes = 1
    """Trainer processes of each machine under torchrun, one per GPU (or any number on CPU)."""
    nodes: int = Field(default=1, ge=1, le=65_536)
    """Machines that train; on each of them `grpo-async train CONFIG --node-rank K` is started, with the same configuration, the
    same $GRPO_ASYNC_TOKEN, and `run.dir` on a file system that they share."""
    rdzv: str | None = None
    """`host:port` of the machine with node rank 0, where the others meet it; needed with more than one node. Traffic between the
    trainer's ranks goes over the interface with this address, unencrypted and without a password: use a private network."""
    rdzv_timeout_s: Seconds = 600.0
    """Time that all machines have to come to `rdzv`, from the first one on."""
    sharding: Literal["full", "hybrid"] = "full"
    """full: parameters are sharded over all ranks. hybrid: over the ranks of a machine, and replicated over machines (HSDP)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs; auto = cuda where there is one."""
    trainer_threads: Processes = 1
    """CPU threads of each trainer rank."""
    stop_timeout_s: Seconds = 60.0
    """Time the trainer has to checkpoint and end after SIGINT / SIGTERM; then it is killed."""
    heartbeat_timeout_s: float = Field(default=300.0, gt=0.0)
    """Longest time without a sign of life of a trainer process: it is stopped, or some code holds its Python interpreter. Then its
    stack is shown and the run ends. What is only slow (a step, a compile, a disk, an evaluation) gives signs of life."""
    slurm: SlurmSection = SlurmSection()
    """For `grpo-async launch slurm`."""

    @field_validator("rdzv")
    @classmethod
    def _rdzv_names_one_address(cls, rdzv: str | None) -> str | None:
        if rdzv is None:
            return None
        try:
            parts = urlsplit(f"//{rdzv}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.netloc != rdzv or "@" in rdzv:
            raise ValueError(f"{rdzv!r} is not host:port, such as 10.0.0.1:29400 or node-1:29400")
        try:
            is_wildcard = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            is_wildcard = False
        if is_wildcard:
            raise ValueError(
                f"{host} would listen on every network; name the address of node 0 in the one that the machines share"
            )
        return rdzv

    @property
    def meeting_point(self) -> tuple[str, int]:
        """Host and port of `rdzv`: "10.0.0.1:29400" -> ("10.0.0.1", 29400); only where it is set."""
        parts = urlsplit(f"//{self.rdzv}")
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    @property
    def world_size(self) -> int:
        """Trainer processes of all machines: nodes x num_trainer_ranks."""
        return self.nodes * self.num_trainer_ranks
