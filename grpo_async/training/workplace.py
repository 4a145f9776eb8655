"""What every trainer rank has, and the loop of the ranks that follow rank 0.

receive command -> do the same part of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.rundir import RunDir
from grpo_async.training.checkpoint_write import CheckpointWriter
from grpo_async.training.export import export_model
from grpo_async.training.objective import Objective
from grpo_async.training.parameters import AdapterParameters, ShardedParameters
from grpo_async.training.peak_memory import peak_bytes
from grpo_async.training.policy import Policy
from grpo_async.training.ranks import (
    CommandChannel,
    ExportCommand,
    GatherCommand,
    SaveCommand,
    ScoreCommand,
    StepCommand,
    StopCommand,
    WaitCommand,
)
from grpo_async.training.reference import Reference
from grpo_async.training.score import score_twice
from grpo_async.training.step import StepResult, train_step
from grpo_async.training.step_clock import NO_CLOCK, StepClock
from grpo_async.training.token_figures import FigureOrder, TokenCollector
from grpo_async.weights.verify import TrainerScores


@dataclass(slots=True, kw_only=True)
class Workplace:
    """What every rank has: its shard of the policy and how it talks to the others."""

    config: ExperimentConfig
    rundir: RunDir
    policy: Policy
    optimizer: torch.optim.Optimizer
    objective: Objective
    reference: Reference | None  # where the objective has a KL
    parameters: ShardedParameters | AdapterParameters
    channel: CommandChannel
    checkpoints: CheckpointWriter
    tokenizer: Any
    device: torch.device
    num_ranks: int
    clock: StepClock = NO_CLOCK
    peaks: Sequence[int] | None = None
    """Most memory that each rank had taken when its first step was done, in bytes; known to rank 0, empty on the others."""

    @property
    def obstacle_to_shared_prompts(self) -> str | None:
        """Why a prompt is computed for each of its samples; None: once for those in a micro-batch. The same on every rank; rank 0
        plans by it."""
        training = self.config.training
        if not training.share_prompts:
            return "training.share_prompts is false"
        if not training.pack:
            return "samples are not packed (training.pack)"
        obstacle = self.policy.obstacle_to_shared_prompts
        if obstacle is None and self.reference is not None:
            obstacle = self.reference.obstacle_to_shared_prompts
        return obstacle

    def step(
        self, minibatches: Sequence[Sequence[MicroBatch]], lr: float, figures: FigureOrder | None = None
    ) -> StepResult:
        """This rank's part of one training step, an update for each minibatch; `figures` of its tokens go to rank 0. A
        collective."""
        tokens = None if figures is None else TokenCollector(figures, self.device)
        result = train_step(
            self.policy,
            self.optimizer,
            minibatches,
            objective=self.objective,
            reference=self.reference,
            lr=lr,
            max_grad_norm=self.config.optimizer.max_grad_norm,
            device=self.device,
            tokens=tokens,
            clock=self.clock,
        )
        if self.peaks is None:
            peaks = self.channel.gather(torch.tensor([peak_bytes(self.device)]))
            self.peaks = [int(peak) for peak in peaks or ()]
        return result if tokens is None else replace(result, token_figures=self.channel.gather(tokens.on_host()))

    def score(self, sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
        """See score_twice; `rounding` is the name of a dtype. A collective."""
        model = self.config.model
        return score_twice(
            self.policy,
            sequences,
            device=self.device,
            compute=getattr(torch, model.compute_dtype or model.dtype),
            rounding=getattr(torch, rounding),
        )


def follow(place: Workplace) -> None:
    """Ranks 1..N-1: do rank 0's commands until it says stop."""
    while True:
        command = place.channel.receive()
        match command:
            case WaitCommand():
                continue
            case StepCommand():
                place.step(command.minibatches, command.lr, command.figures)
            case GatherCommand():
                for _ in place.parameters.buckets(command.bucket_bytes):
                    pass  # only rank 0 sends
            case ScoreCommand():
                place.score(command.sequences, command.rounding)
            case SaveCommand():
                place.checkpoints.begin(command.step, place.policy, place.optimizer, None)
            case ExportCommand():
                export_model(place.rundir.model, place.policy, place.tokenizer, adapter=place.rundir.adapter)
            case StopCommand():
                place.checkpoints.wait()
                return
