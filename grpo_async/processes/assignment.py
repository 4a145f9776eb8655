"""What the launcher tells the trainer's processes: one record, as JSON in one environment variable (launch.plan sets it)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel

from grpo_async.config.base import TransportKind
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir

ASSIGNMENT_VARIABLE = "GRPO_ASYNC_ASSIGNMENT"
Purpose: TypeAlias = Literal["train", "evaluation"]


class Node(BaseModel, frozen=True, extra="forbid"):
    """This machine among those that train. torchrun's agents and the ranks meet at `address` and `port`, of the first one;
    `own_address` is this machine's. A run on one machine has the defaults."""

    rank: int = 0
    count: int = 1
    address: str = ""
    port: int = 0
    own_address: str = ""

    @property
    def is_alone(self) -> bool:
        return not self.own_address


class Assignment(BaseModel, frozen=True, extra="forbid"):
    """One process of the trainer, and what it works on. On the second of two machines with two ranks each, torchrun's
    second process has node.rank 1, rank 3, local_rank 1 and world_size 4."""

    run_dir: RunDir
    attempt_dir: Path
    """Folder of this attempt's logs."""
    private_dir: Path
    """A folder of this machine that only this user can enter: for sockets, and for the files through which the ranks meet, as do
    trainer and servers for the weights. The launcher removes it."""
    server_urls: tuple[str, ...] = ()
    """A server's index is its position here; it keeps its URL over restarts."""
    transport: TransportKind = "gloo"
    """How weights travel, as planned from `weights.transport` and the devices."""
    on_gpu: bool = False
    """Whether the ranks train on GPUs, as planned from `launch.device` and what the machine has."""
    resume_step: int | None = None
    resume_is_named: bool = False
    """The user has named the step. Else the one before takes its place where the ranks find its tensors damaged."""
    purpose: Purpose = "train"
    """evaluation: `grpo-async eval`, which evaluates before the first step and ends."""
    node: Node = Node()
    rank: int = 0
    """Rank of this process among `world_size`, over all machines; torchrun sets it, like the other two."""
    local_rank: int = 0
    world_size: int = 1

    @property
    def control_socket(self) -> Path:
        return self.private_dir / "control"

    @property
    def file_store(self) -> Path | None:
        """The file of the torch FileStore in which the ranks meet; None: in torchrun's own store (ranks on several machines)."""
        return self.private_dir / "store" if self.node.count == 1 else None

    @classmethod
    def from_environment(cls) -> Assignment:
        """Read the variable, and torchrun's. Raises ConfigError: it is missing or nonsense (the trainer was started by hand)."""
        env = os.environ
        try:
            given = cls.model_validate_json(env[ASSIGNMENT_VARIABLE])
            ranks = {
                name: int(env[name.upper()]) for name in ("rank", "local_rank", "world_size") if name.upper() in env
            }
        except (KeyError, ValueError) as error:
            what = f"${ASSIGNMENT_VARIABLE} is missing or broken ({error})"
            raise ConfigError(f"{what}; start with `grpo-async train CONFIG`") from error
        return given.model_copy(update=ranks)
