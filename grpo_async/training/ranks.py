"""Keeps the trainer's ranks in lockstep: rank 0 sends commands and does its own part of each; the others `follow`.

A command travels on a separate gloo group, whose deadline is long: the other ranks wait there while rank 0 waits for samples.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.batching.pack import MicroBatch, RankSamples
from grpo_async.config import ExperimentConfig
from grpo_async.errors import DeadlineError, RunError
from grpo_async.run_directory import RunDir
from grpo_async.training.checkpoint import CheckpointState, CheckpointWriter, load_tensors
from grpo_async.training.export import export_model
from grpo_async.training.loss import Objective
from grpo_async.training.model import Policy, Reference
from grpo_async.training.parameters import list_sources, local_of
from grpo_async.training.pipeline import peak_bytes
from grpo_async.training.quantize import layers_in_4_bits
from grpo_async.training.step import StepResult, train_step
from grpo_async.training.token_statistics import TokenCollector
from grpo_async.training.verify import TrainerScores, score_twice
from grpo_async.weights.buckets import GatheredParameters
from grpo_async.weights.ipc import SharedBuffers
from grpo_async.weights.push import GatherCommand, hand_over


@dataclass(frozen=True, slots=True)
class PackCommand:
    """Pack this rank's samples of the next step; they replace those packed before."""

    minibatches: Sequence[RankSamples]


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Train on what was packed: `training.num_iterations` passes over the minibatches, with one optimizer update for each.
    During it one more command follows: PackCommand for the step after it, or WaitCommand."""

    lr: float
    seed: int = 0
    """Seed of this rank's random numbers (dropout): a new one for each step, so a resume needs no generator state."""
    token_capacity: int = 0
    """Statistics of at most this many tokens, the same number on every rank, are sent to rank 0; 0: they are not stored."""
    loss_scale: float = 1.0
    """See train_step."""
    syncs_reference: bool = False
    """Whether Reference.sync follows the step."""


@dataclass(frozen=True, slots=True)
class WaitCommand:
    """Rank 0 is alive but has nothing for the others to do, for example while it waits for samples."""


@dataclass(frozen=True, slots=True)
class ScoreCommand:
    sequences: Sequence[Sequence[int]]
    rounding: str
    """Name of a dtype; see score_twice."""


@dataclass(frozen=True, slots=True)
class ExchangeCommand:
    """See TrainerContext.exchange_weights."""


@dataclass(frozen=True, slots=True)
class SaveCommand:
    step: int


@dataclass(frozen=True, slots=True)
class ExportCommand:
    """Write the final model."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """The run is over."""


Command = (
    PackCommand
    | StepCommand
    | WaitCommand
    | GatherCommand
    | ScoreCommand
    | ExchangeCommand
    | SaveCommand
    | ExportCommand
    | StopCommand
)


class CommandChannel:
    """Rank 0 sends a command; every other rank receives its own part of it, or waits for at most `timeout_s`. With one rank nothing
    is sent."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rank: int = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self._world_size > 1 else None
        )

    def send(self, commands: Sequence[Command]) -> None:
        """On rank 0: send each rank its command. [world_size]"""
        if self._group is not None:
            dist.scatter_object_list([None], list(commands), src=0, group=self._group)

    def send_all(self, command: Command) -> None:
        self.send([command] * self._world_size)

    def heartbeat(self) -> None:
        """On rank 0: tell the other ranks, which wait with a deadline, that it is still waiting."""
        self.send_all(WaitCommand())

    def receive(self) -> Command:
        """On the other ranks: wait for the next command. Raises DeadlineError, or RunError when rank 0 is gone."""
        received: list[Any] = [None]
        with self._waiting(f"a command of rank 0 on rank {self._rank}", peer="rank 0, which has ended"):
            dist.scatter_object_list(received, None, src=0, group=self._group)
        command = received[0]
        if not isinstance(command, Command):
            raise RunError(f"rank {self._rank} received {type(command).__name__}, which is not a command")
        return command

    def gather(self, numbers: torch.Tensor) -> list[torch.Tensor] | None:
        """Bring a tensor of every rank, on the CPU and of one shape and dtype, to rank 0, which gets the list; the others get
        None. A collective. Raises DeadlineError, or RunError when a rank is gone."""
        if self._group is None:
            return [numbers]
        parts = [torch.empty_like(numbers) for _ in range(self._world_size)] if self._rank == 0 else None
        with self._waiting(f"a gather of all ranks, on rank {self._rank}", peer="another rank"):
            dist.gather(numbers, parts, dst=0, group=self._group)
        return parts

    @contextlib.contextmanager
    def _waiting(self, what: str, *, peer: str) -> Iterator[None]:
        """Names the failure of a collective: it reached its deadline while it waited for `what`, or `peer` is gone."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            if waited_s < self._timeout_s:
                raise RunError(f"rank {self._rank} lost the connection to {peer}: {error}") from error
            raise DeadlineError(what, waited_s=waited_s, setting="training.queue_timeout_s") from error


@dataclass(slots=True, kw_only=True)
class TrainerContext:
    """What every rank has: its shard of the policy, and its channel to the others."""

    config: ExperimentConfig
    run_dir: RunDir
    policy: Policy
    optimizer: torch.optim.Optimizer
    objective: Objective
    reference: Reference | None  # if the objective has a KL term
    parameters: GatheredParameters
    channel: CommandChannel
    checkpoints: CheckpointWriter
    tokenizer: Any
    device: torch.device
    world_size: int
    packed: Sequence[Sequence[MicroBatch]] = ()
    """This rank's micro-batches of the next step, on the CPU. [num_minibatches][num_micro_batches]"""
    peaks: Sequence[int] | None = None
    """Peak memory of each rank at the end of its first step, in bytes; set on rank 0, empty on the others."""
    _factors: Sequence[torch.Tensor] = ()  # of the adapters, while the weights are exchanged

    @property
    def num_parameters(self) -> int:
        """Parameters of the policy, with adapters merged: those of its checkpoint, whatever a push sends."""
        sources = list_sources(self.policy.model)
        return sum(math.prod(source.shape) for source in sources if not source.is_buffer)

    @property
    def _synced_reference(self) -> Policy | None:
        """The reference if it is synced with the policy, so that checkpoints must contain it."""
        return self.reference.policy if self.reference is not None and self.config.loss.sync_ref_model else None

    def load(self, step: int) -> None:
        load_tensors(self.run_dir, step, self.policy, self.optimizer, reference=self._synced_reference)

    def save(
        self, step: int, state: CheckpointState | None = None, *, on_written: Callable[[], None] = lambda: None
    ) -> None:
        reference = self._synced_reference
        self.checkpoints.begin(step, self.policy, self.optimizer, state, reference=reference, on_written=on_written)

    def export(self, *, card: str | None = None, heartbeat: Callable[[], None] = lambda: None) -> None:
        export_model(
            self.run_dir.model,
            self.policy,
            self.tokenizer,
            dtype=self.config.inference.resolved_dtype,
            end_tokens=self.config.model.end_of_turn_tokens,
            adapter=self.run_dir.adapter,
            card=card,
            heartbeat=heartbeat,
        )

    def pack(self, command: PackCommand) -> None:
        size = self.config.training.context_parallel
        self.packed = [samples.pack(context_parallel=size) for samples in command.minibatches]

    def step(self, command: StepCommand, *, before_sync: Callable[[], None]) -> StepResult:
        """Run this rank's part of one training step on the packed samples, one update for each minibatch (see StepCommand). A
        collective. `before_sync`: see train_step."""
        torch.manual_seed(command.seed)
        minibatches, self.packed = self.packed, ()
        tokens = TokenCollector(command.token_capacity, self.device) if command.token_capacity else None
        result = train_step(
            self.policy,
            self.optimizer,
            minibatches,
            objective=self.objective,
            reference=self.reference,
            lr=command.lr,
            max_grad_norm=self.config.optimizer.max_grad_norm,
            device=self.device,
            num_iterations=self.config.training.num_iterations,
            tokens=tokens,
            loss_scale=command.loss_scale,
            before_sync=before_sync,
        )
        if command.syncs_reference:
            assert self.reference is not None
            self.reference.sync(self.policy, alpha=self.config.loss.ref_model_mixup_alpha)
        wakes_servers = self.config.inference.vllm.sleep_while_training and self.device.type == "cuda"
        peak = peak_bytes(self.device)
        if wakes_servers:
            torch.cuda.empty_cache()  # the servers on these GPUs take this memory back
        if wakes_servers or self.peaks is None:  # rank 0 wakes the servers when every rank has freed it
            peaks = self.channel.gather(torch.tensor([peak]))
            self.peaks = self.peaks or [int(each) for each in peaks or ()]
        if tokens is None:
            return result
        statistics = self.channel.gather(tokens.on_host()) or ()  # of ranks that compute together the first has them
        return replace(result, token_statistics=statistics[:: self.config.training.context_parallel])

    def score(self, sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
        model = self.config.model
        return score_twice(
            self.policy,
            sequences,
            device=self.device,
            compute=getattr(torch, model.resolved_compute_dtype),
            rounding=getattr(torch, rounding),
        )

    @torch.no_grad()
    def exchange_weights(self) -> None:
        """Exchange all that a push sends for weights far from it, or bring the true ones back, to the last bit. All are negated; of
        adapters, which may be pushed alone and begin as 0, the factors B are all 1/8, which about doubles a weight."""
        sent = {name: local_of(tensor) for name, tensor in self.policy.named_parameters()}
        if self.parameters.base is None:
            scales = [layer.absmax for _, layer in layers_in_4_bits(self.policy.model)]  # of packed weights
            for tensor in [*scales, *(each for each in sent.values() if each.dtype.is_floating_point)]:
                tensor.neg_()
            return
        factors = [tensor for name, tensor in sent.items() if ".lora_B." in name]
        kept, self._factors = self._factors, () if self._factors else [factor.clone() for factor in factors]
        for number, factor in enumerate(factors):
            factor.copy_(kept[number]) if kept else factor.fill_(0.125)


def follow(context: TrainerContext) -> None:
    """On ranks 1..N-1: execute rank 0's commands until it sends StopCommand."""
    shared: SharedBuffers | None = None
    while True:
        command = context.channel.receive()
        match command:
            case WaitCommand():
                continue
            case PackCommand():
                context.pack(command)
            case StepCommand():
                context.step(command, before_sync=lambda: _pack_next(context))
            case GatherCommand():
                if command.worker_gpus:
                    shared = None  # that of a group that has ended
                shared = hand_over(context.parameters, command, shared, device=context.device)
            case ScoreCommand():
                context.score(command.sequences, command.rounding)
            case ExchangeCommand():
                context.exchange_weights()
            case SaveCommand():
                context.save(command.step)
            case ExportCommand():
                context.export()
            case StopCommand():
                context.checkpoints.wait()
                return


def _pack_next(context: TrainerContext) -> None:
    match context.channel.receive():
        case WaitCommand():
            return
        case PackCommand() as command:
            context.pack(command)
        case other:
            raise RunError(f"in the middle of a step rank 0 sent {type(other).__name__}")
