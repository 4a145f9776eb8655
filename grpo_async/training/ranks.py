"""Keeps the trainer's ranks in lockstep: rank 0 decides, the others follow its commands.

    rank 0:  lead.step(...)   lead.push()   lead.save(...)   lead.stop()
    others:  follow() runs the same work on every command until `stop`

The command travels on a gloo group of its own, whose deadline is long: the other ranks wait there while rank 0 waits for samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.batching.pack import MicroBatch
from grpo_async.errors import DeadlineError, RunError
from grpo_async.training.token_figures import FigureOrder


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Train on this rank's micro-batches, those of one minibatch after another: an optimizer update for each minibatch."""

    minibatches: Sequence[Sequence[MicroBatch]]
    lr: float
    figures: FigureOrder | None = None
    """Of its tokens, to be brought to rank 0; the same on all ranks whether there is one."""


@dataclass(frozen=True, slots=True)
class WaitCommand:
    """Rank 0 is alive and waits for samples; do nothing."""


@dataclass(frozen=True, slots=True)
class GatherCommand:
    """Take part in gathering all parameters, bucket by bucket."""

    bucket_bytes: int


@dataclass(frozen=True, slots=True)
class ScoreCommand:
    """Take part in computing the log-probabilities of these token sequences."""

    sequences: Sequence[Sequence[int]]
    rounding: str
    """Dtype."""


@dataclass(frozen=True, slots=True)
class SaveCommand:
    """Take part in writing checkpoint `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class ExportCommand:
    """Take part in writing the final model."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """The run is over."""


Command = StepCommand | WaitCommand | GatherCommand | ScoreCommand | SaveCommand | ExportCommand | StopCommand


class CommandChannel:
    """Rank 0 sends a command, every other rank receives its own part of it. With one rank nothing is sent.

    Args:
        timeout_s: longest time without a command.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rank: int = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self._world_size > 1 else None
        )

    @property
    def is_leader(self) -> bool:
        return self._rank == 0

    def send(self, commands: Sequence[Command]) -> None:
        """Rank 0: give each rank its command. [world_size]"""
        if self._group is not None:
            dist.scatter_object_list([None], list(commands), src=0, group=self._group)

    def receive(self) -> Command:
        """Other ranks: wait for the next command.

        Raises:
            DeadlineError: none within the deadline, or rank 0 is gone.
        """
        received: list[Any] = [None]
        with self._waiting(f"a command of rank 0 on rank {self._rank}", peer="rank 0, which has ended"):
            dist.scatter_object_list(received, None, src=0, group=self._group)
        command = received[0]
        if not isinstance(command, Command):
            raise RunError(f"rank {self._rank} received {type(command).__name__}, which is not a command")
        return command

    def gather(self, numbers: torch.Tensor) -> list[torch.Tensor] | None:
        """Bring a tensor of every rank to rank 0: one for each rank there, None on the others. A collective.

        Args:
            numbers: on the CPU, of the same shape and dtype on every rank.

        Raises:
            DeadlineError: a rank did not come within the deadline.
            RunError: a rank is gone.
        """
        if self._group is None:
            return [numbers]
        parts = [torch.empty_like(numbers) for _ in range(self._world_size)] if self.is_leader else None
        with self._waiting(f"the figures of the tokens of all ranks, on rank {self._rank}", peer="another rank"):
            dist.gather(numbers, parts, dst=0, group=self._group)
        return parts

    @contextlib.contextmanager
    def _waiting(self, what: str, *, peer: str) -> Iterator[None]:
        """A collective that fails after the deadline has waited for `what` in vain; before it, `peer` is gone."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            if waited_s < self._timeout_s:
                raise RunError(f"rank {self._rank} lost the connection to {peer}: {error}") from error
            raise DeadlineError(what, waited_s=waited_s, setting="training.queue_timeout_s") from error


def device_for(kind: str, local_rank: int) -> torch.device:
    """cpu, or the GPU of this local rank."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", local_rank)
