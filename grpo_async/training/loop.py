"""The trainer's main loop on rank 0; the others follow its commands (training.workplace).

    take groups -> plan -> pack -> step -> settle -> push weights -> log -> checkpoint

Version = finished optimizer steps. The loop knows its sources and sinks as small protocols; `launch.trainer` connects them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grpo_async.batching.pack import pack_rank, token_weights
from grpo_async.batching.plan import plan_batch
from grpo_async.errors import RunError
from grpo_async.records import GroupStatus, RolloutSample, ScoredGroup
from grpo_async.training.checkpoint import TrainerState, export_model, prune_checkpoints, save_checkpoint
from grpo_async.training.meter import PipelineMeter, Reading
from grpo_async.training.ranks import (
    Command,
    ExportCommand,
    GatherCommand,
    SaveCommand,
    ScoreCommand,
    StepCommand,
    StopCommand,
    WaitCommand,
)
from grpo_async.training.step import StepResult
from grpo_async.training.workplace import Workplace

logger = logging.getLogger(__name__)


class RolloutSource(Protocol):
    """Where samples come from: the rollout thread with its buffer and ledger."""

    def take(
        self,
        num_groups: int,
        *,
        trainer_version: int,
        heartbeat: Callable[[], None],
        attend: Callable[[], None],
    ) -> list[ScoredGroup] | None:
        """Block until there are groups, calling `heartbeat` now and then and `attend` whenever the servers change; None when the
        run is to stop."""

    def settle(self, groups: Sequence[ScoredGroup], status: GroupStatus, *, step: int) -> None: ...

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]: ...

    def advance(self, version: int) -> None:
        """The servers serve `version` from now on."""

    def resume_state(self) -> tuple[dict[str, Any], list[int], dict[str, dict[str, int]]]:
        """Data cursor, prompts to issue again, ledger."""

    def gauges(self) -> dict[str, float]:
        """Queue length and ledger."""


class WeightSync(Protocol):
    """The way of the weights to the inference servers."""

    @property
    def has_joiners(self) -> bool:
        """Whether some server could serve if it had the weights."""

    def push(self, version: int, *, before_gather: Callable[[], None]) -> dict[str, float] | None:
        """Push the current weights as `version` to every server that is up, and return metrics; None when no server is.

        Calls `before_gather` before each pass over the parameters: the other ranks have to take part in it.
        """

    def verify(self, score: Callable[[Sequence[Sequence[int]]], list[list[float]]]) -> dict[str, float]:
        """Where it is due, compare the servers with `score`, the trainer's own log-probabilities; returns metrics.

        Raises:
            RunError: a server serves other weights than the trainer has.
        """

    def rest(self) -> None:
        """A step begins to train. What the servers hold of a shared GPU may be given back until the next push."""


class LeaderLoop:
    """Rank 0.

    Args:
        place: this rank's shard.
        source: samples.
        sync: the way of the weights to the servers.
        read: reads clock and server counters.
        on_step: gets (step, metrics) after each step.
        meter: figures of the run.
        progress: further state to keep in checkpoints.
        saved_step: the checkpoint that this run goes on from.
    """

    def __init__(
        self,
        place: Workplace,
        *,
        source: RolloutSource,
        sync: WeightSync,
        read: Callable[[], Reading],
        on_step: Callable[[int, dict[str, float]], None],
        meter: PipelineMeter,
        progress: dict[str, Any],
        saved_step: int | None = None,
    ) -> None:
        self._place = place
        self._config = place.config
        self._source = source
        self._sync = sync
        self._read = read
        self._on_step = on_step
        self._meter = meter
        self._progress = progress
        self._bad_steps = 0
        self._pushed_version = -1
        self._saved_step = saved_step
        self._version = 0  # of the weights in this process

    def push(self, version: int) -> dict[str, float]:
        """Push the current weights as `version`, on all ranks. With no server up, training goes on with what is queued: the
        weights follow as soon as one is (`attend`)."""
        gather = GatherCommand(bucket_bytes=self._config.weights.bucket_mb << 20)
        self._version = version
        metrics = self._sync.push(version, before_gather=lambda: self._command_all(gather))
        if metrics is None:
            return {"sync/skipped": 1.0}
        metrics.update(self._sync.verify(self.score))
        self._pushed_version = version
        self._source.advance(version)
        return metrics

    def _push_or_save(self, step: int) -> dict[str, float]:
        """Push; when that fails for good, the steps so far are saved before the error goes on."""
        try:
            return self.push(step)
        except RunError:
            self._save_in_need(step)
            raise

    def attend(self) -> None:
        """The servers have changed while this thread waited: give the weights to those that can serve again."""
        if self._sync.has_joiners:
            self.push(self._version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of token sequences under the current weights, on all ranks; see training.score."""
        self._command_all(ScoreCommand(sequences=sequences))
        return self._place.score(sequences)

    def run(self, *, first_step: int) -> int:
        """Train to `training.max_steps` or until the source says stop; returns the number of finished steps.

        Raises:
            RunError: too many steps in a row were not finite, generation died, a deadline passed.
        """
        config = self._config
        for step in range(first_step, config.training.max_steps + 1):
            wait_began = time.monotonic()
            groups = self._take(step)
            if groups is None:
                return step - 1
            waited_s = time.monotonic() - wait_began
            metrics = self._source.group_metrics(groups)
            samples = [sample for group in groups for sample in group.samples]
            self._sync.rest()
            result = self._train(samples, step)
            self._version = step
            self._check_finite(result, step)
            trained = [group for group in groups if group.samples]
            self._source.settle(trained, GroupStatus.TRAINED if result.is_finite else GroupStatus.FAILED, step=step)
            if step % config.training.weight_sync_steps == 0 or step == config.training.max_steps:
                metrics.update(self._push_or_save(step))
            # tokens that are not trained have version -1
            versions = [v for sample in samples for v in sample.policy_versions if v >= 0] if result.is_finite else []
            metrics.update(result.metrics)
            metrics.update(
                self._meter.step(
                    self._read(),
                    waited_s=waited_s,
                    trained_tokens=result.num_tokens if result.is_finite else 0,
                    staleness=[step - 1 - version for version in versions],
                    reward=metrics.get("reward"),
                )
            )
            metrics.update(self._source.gauges())
            self._on_step(step, metrics)
            if step % config.checkpoint.every_steps == 0 and step < config.training.max_steps:
                self.save(step)
        return config.training.max_steps

    def _take(self, step: int) -> list[ScoredGroup] | None:
        """The groups of a step. When generation has failed for good, the steps so far are saved before its error goes on."""
        try:
            return self._source.take(
                self._config.rollout.groups_per_step,
                trainer_version=step - 1,
                heartbeat=self.heartbeat,
                attend=self.attend,
            )
        except RunError:
            self._save_in_need(step - 1)
            raise

    def _save_in_need(self, step: int) -> None:
        try:
            self.save(step)
        except RunError:
            logger.exception("the steps since the last checkpoint could not be saved")  # the cause goes on

    def _train(self, samples: Sequence[RolloutSample], step: int) -> StepResult:
        config, place = self._config, self._place
        plan = plan_batch(
            [len(sample.token_ids) for sample in samples],
            num_ranks=place.num_ranks,
            micro_batch_tokens=config.training.micro_batch_tokens,
            row_tokens=config.training.row_tokens,
            pack=config.training.pack,
        )
        weights = token_weights(
            samples,
            reduction=config.loss.reduction or "dapo",
            max_completion_tokens=config.rollout.max_completion_tokens,
        )
        lr = config.optimizer.lr * config.lr_factor(step - 1)
        parts = [pack_rank(samples, weights, plan, rank, trainer_version=step - 1) for rank in range(place.num_ranks)]
        place.channel.send([StepCommand(micro_batches=part, lr=lr) for part in parts])
        return place.step(parts[0], lr)

    def _check_finite(self, result: StepResult, step: int) -> None:
        if result.is_finite:
            self._bad_steps = 0
            return
        self._bad_steps += 1
        logger.warning(
            "step %d was skipped: loss %s, gradient norm %s (%d in a row)",
            step,
            result.loss,
            result.grad_norm,
            self._bad_steps,
        )
        if self._bad_steps >= self._config.training.max_bad_steps:
            raise RunError(
                f"{self._bad_steps} steps in a row were not finite; step {step} had loss {result.loss} and gradient norm "
                f"{result.grad_norm}. Lower optimizer.lr, or look at sampling/importance_sampling_ratio/max in metrics.jsonl"
            )

    def save(self, step: int) -> None:
        """Write checkpoint `step` on all ranks and remove old ones. Generation goes on meanwhile."""
        if step == self._saved_step:
            return
        data, outstanding, ledger = self._source.resume_state()
        state = TrainerState(
            step=step,
            data=data,
            outstanding_prompts=outstanding,
            ledger=ledger,
            progress={**self._progress, "totals": self._meter.totals.as_dict()},
        )
        place = self._place
        self._command_all(SaveCommand(step=step))
        save_checkpoint(place.rundir, step, place.policy, place.optimizer, state)
        prune_checkpoints(place.rundir, keep_last=self._config.checkpoint.keep_last)
        self._saved_step = step

    def finish(self, step: int) -> None:
        """Write the last checkpoint and the exported model, and make the servers serve the last weights."""
        self.save(step)
        self._command_all(ExportCommand())
        export_model(self._place.rundir.model, self._place.policy, self._place.tokenizer)
        if self._pushed_version != step:
            self.push(step)

    def stop_followers(self) -> None:
        self._command_all(StopCommand())

    def heartbeat(self) -> None:
        """Tell the other ranks, which wait with a deadline, that this one waits too."""
        self._command_all(WaitCommand())

    def _command_all(self, command: Command) -> None:
        self._place.channel.send([command] * self._place.num_ranks)
