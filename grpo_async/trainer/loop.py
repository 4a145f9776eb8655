"""The trainer's main loop on rank 0; the other ranks follow its commands (training.ranks).

    take groups -> plan -> pack -> step -> close groups -> push weights -> log -> checkpoint

Version = finished optimizer steps. `trainer.lead` makes the loop and what it talks to.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from grpo_async.batching.minibatch import Minibatch, split_groups
from grpo_async.batching.pack import RankSamples, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.batching.weights import token_weights
from grpo_async.errors import RunError
from grpo_async.evaluation.evaluations import RunEvaluations
from grpo_async.records import GroupStatus, RolloutSample, ScoredGroup, TokenStats
from grpo_async.rollout.source import RolloutSource
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.checkpoint import CheckpointState
from grpo_async.training.export import export_model, model_card
from grpo_async.training.loss_scale import LossScale
from grpo_async.training.metrics import CounterSnapshot, PipelineMeter
from grpo_async.training.ranks import (
    Command,
    ExportCommand,
    GatherCommand,
    SaveCommand,
    ScoreCommand,
    StepCommand,
    StopCommand,
    TrainerContext,
    WaitCommand,
)
from grpo_async.training.schedule import lr_factors
from grpo_async.training.step import StepResult
from grpo_async.training.timing import Activity
from grpo_async.training.token_statistics import TokenPlan
from grpo_async.weights.verify import TrainerScores

logger = logging.getLogger(__name__)
_MAX_NONFINITE_STEPS = 3  # in a row, each skipped; then the run ends


class LeaderLoop:
    """Rank 0.

    Args:
        context: this rank's shard.
        source: samples.
        sync: pushes the weights to the servers.
        read: reads clock and server counters.
        on_step: gets (step, metrics, the groups that it took) after each step.
        meter: metrics of the pipeline.
        resumed: the checkpoint that this run resumes from.
        on_saved: called by the writing thread when a checkpoint stands; removes old ones.
        evaluations: during training; None: none.
        timeline: takes what this thread does.
    """

    def __init__(
        self,
        context: TrainerContext,
        *,
        source: RolloutSource,
        sync: FleetSync,
        read: Callable[[], CounterSnapshot],
        on_step: Callable[[int, dict[str, float], Sequence[ScoredGroup]], None],
        meter: PipelineMeter,
        resumed: CheckpointState | None = None,
        evaluations: RunEvaluations | None = None,
        on_saved: Callable[[], None] = lambda: None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._timeline = timeline
        self._context = context
        self._config = context.config
        self._lr_factor = lr_factors(context.config)
        self._on_saved = on_saved
        self._source = source
        self._sync = sync
        self._read = read
        self._on_step = on_step
        self._meter = meter
        self._evaluations = evaluations
        self._push_is_held = False  # by an evaluation: it follows as soon as that is over
        counters = resumed.counters if resumed else {}
        bad_steps = counters.get("bad_steps", 0)
        # at its limit it ended the run before: the next step that is not finite would be the end again
        self._bad_steps = bad_steps if bad_steps < _MAX_NONFINITE_STEPS else 0
        is_half = self._config.model.compute_dtype == "float16"
        self._loss_scale = LossScale(counters) if is_half else None
        self._pushed_version = -1
        self._saved_step = resumed.step if resumed else None
        self._version = 0  # of the weights in this process
        self.is_complete = False
        """Whether `run` came to the end of the run: its last step, or that of the data."""
        self.activity = Activity(timeline)
        """What this thread does; the stall guard reads it."""

    @property
    def version(self) -> int:
        """Of the weights in this process: the number of finished steps. From any thread."""
        return self._version

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written. From any thread."""
        return self._context.checkpoints.is_writing

    @property
    def longest_save_s(self) -> float:
        """How long the writing of one checkpoint may take."""
        return self._context.checkpoints.longest_s

    def push(self, version: int) -> dict[str, float]:
        """Push the current weights as `version`, on all ranks. With no server up, training continues with what is queued: the
        weights follow as soon as one is (`push_if_needed`)."""

        def gather(bucket_bytes: int) -> None:
            self._command_all(GatherCommand(bucket_bytes=bucket_bytes))

        self._version = version
        self._push_is_held = False
        with self.activity.during(f"pushing version {version} to the servers", "push", "pushing", version=version):
            metrics = self._sync.push(version, before_gather=gather)
        if metrics is None:
            return {"sync/skipped": 1.0}
        began = time.time()
        if verified := self._sync.verify(self.score):
            self._timeline.add("verify weights", "trainer", began, time.time())
            metrics.update(verified)
        self._pushed_version = version
        self._source.advance(version)
        return metrics

    def _push_or_save(self, step: int) -> dict[str, float]:
        """Push; when that fails for good, the steps so far are saved before the error propagates."""
        try:
            return self.push(step)
        except RunError:
            self._save_before_error(step)
            raise

    def push_if_needed(self) -> None:
        """Something has changed while this thread waited: give the weights to servers that can serve again, and make the push that
        an evaluation held back until now. While one holds it and another server serves, those that come back wait, too: a push goes
        to all."""
        is_held = self._evaluation_holds_push and self._version != self._pushed_version
        joins = self._sync.has_ready and not (is_held and self._sync.has_serving)
        if joins or (self._push_is_held and not self._evaluation_holds_push):
            self.push(self._version)

    @property
    def _evaluation_holds_push(self) -> bool:
        return self._evaluations is not None and self._evaluations.holds_push

    def score(self, sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
        """Log-probabilities of token sequences under the current weights, on all ranks; see training.reference."""
        self._command_all(ScoreCommand(sequences=sequences, rounding=rounding))
        return self._context.score(sequences, rounding)

    def run(self, *, first_step: int) -> int:
        """Train to the last step, the end of the data, or until the source says stop; returns the number of finished steps.

        Raises:
            RunError: too many consecutive steps were not finite, generation died, a deadline passed.
        """
        config = self._config
        self.activity.take_seconds()  # what was before is in no step
        for step in range(first_step, config.num_steps + 1):
            self.activity.begin(f"in step {step}")
            self._context.checkpoints.poll()
            began = time.time()
            groups = self._take(step)
            if not groups:
                self.is_complete = groups is not None
                return step - 1
            metrics = self._source.group_metrics(groups)
            minibatches = split_groups(groups, config.training.minibatches)
            self._sync.sleep_servers()
            with self.activity.during(f"training step {step}", "train", "training", step=step):
                result, statistics = self._train(minibatches, step)
            self._version = step
            with self._timeline.span("close groups", "trainer", step=step):
                empty = [group for group in groups if not group.samples]
                self._source.close_groups(empty, GroupStatus.FILTERED, step=step)
                trained = self._close_groups(minibatches, result, statistics, step)
            is_due = step % config.training.weight_sync_steps == 0 or step == config.num_steps
            if (is_due or self._push_is_held) and self._evaluation_holds_push:
                self._push_is_held = True
                metrics["sync/held"] = 1.0
            elif is_due or self._push_is_held:
                metrics.update(self._push_or_save(step))
            metrics.update(result.metrics)
            metrics.update(
                self._meter.step(
                    self._read(),
                    trained_tokens=result.num_tokens,
                    staleness=_staleness(trained, step - 1),
                    reward=metrics.get("reward"),
                    spent=self.activity.take_seconds(),
                )
            )
            metrics.update(self._source.gauges())
            metrics.update(self._context.checkpoints.take_metrics())
            if self._push_is_held and not self._evaluation_holds_push:  # it has ended since
                metrics.pop("sync/held", None)
                metrics.update(self._push_or_save(step))
            if self._evaluations is not None:
                self._evaluations.after_step(step, metrics, is_served=self._pushed_version == step)
            with self._timeline.span("log", "trainer", step=step):
                self._on_step(step, metrics, groups)
            self._timeline.add("step", "trainer", began, time.time(), step=step, tokens=result.num_tokens)
            self._check_finite(result, step)
            if step % config.checkpoint.every_steps == 0 and step < config.num_steps:
                self.save(step)
        self.is_complete = True
        return config.num_steps

    def _take(self, step: int) -> list[ScoredGroup] | None:
        """The groups of a step; see RolloutSource.take. When generation has failed for good, the steps so far are saved before
        its error propagates."""
        waiting = f"waiting for the samples of step {step}"
        try:
            with self.activity.during(waiting, "wait for samples", "waiting", step=step):
                return self._source.take(
                    self._config.rollout.groups_per_step,
                    trainer_version=step - 1,
                    heartbeat=self.heartbeat,
                    on_change=self.push_if_needed,
                )
        except RunError:
            self._save_before_error(step - 1)
            raise

    def _save_before_error(self, step: int) -> None:
        try:
            self.save(step, wait=True)
        except RunError:
            logger.exception("the steps since the last checkpoint could not be saved")  # the cause propagates

    def _train(self, minibatches: Sequence[Minibatch], step: int) -> tuple[StepResult, Mapping[str, TokenStats]]:
        """One step on all ranks, and the statistics of the tokens that are stored, by rollout id."""
        config, context = self._config, self._context
        lr = config.optimizer.lr * self._lr_factor(step - 1)
        parts: list[list[RankSamples]] = []  # [num_minibatches][num_ranks]
        tokens = TokenPlan(context.num_ranks)
        began = time.time()
        num_tokens = num_computed = num_rows = 0
        for minibatch in minibatches:
            samples = minibatch.samples
            plan = plan_batch(
                [len(sample.token_ids) for sample in samples],
                num_ranks=context.num_ranks,
                micro_batch_tokens=config.training.micro_batch_tokens,
                pack=config.training.pack,
            )
            weights = token_weights(
                samples,
                plan,
                reduction=config.loss.reduction_in_use,
                max_completion_tokens=config.rollout.max_completion_tokens,
                num_masked=minibatch.num_masked,
            )
            parts.append(split_by_rank(samples, weights, plan, trainer_version=step - 1))
            num_rows += len(samples)
            num_tokens += sum(len(sample.token_ids) for sample in samples)
            num_computed += plan.num_computed_tokens
            ids = {sample.group_id for sample in samples} if config.record.rollouts.token_stats else set()
            stored = {group_id for group_id in ids if self._source.stores(group_id)}
            tokens.add(samples, plan, is_stored=[sample.group_id in stored for sample in samples])
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale.value)
        moves = config.loss.sync_ref_model and step % config.loss.ref_model_sync_steps == 0
        commands = [
            StepCommand(minibatches=mine, lr=lr, token_room=tokens.room, loss_scale=scale, moves_reference=moves)
            for mine in zip(*parts, strict=True)
        ]
        context.channel.send(commands)
        packed = commands[0].pack()
        self._timeline.add("plan and pack", "trainer", began, time.time(), step=step, rows=num_rows)
        result = context.step(commands[0], packed)
        if self._loss_scale is not None:
            result.metrics["training/loss_scale"] = scale
            self._loss_scale.update(result.updates)
        result.metrics["training/padding_fraction"] = 1.0 - num_tokens / num_computed
        collected = result.token_statistics
        return result, {} if collected is None else tokens.by_rollout(collected, result.trained)

    def _close_groups(
        self, minibatches: Sequence[Minibatch], result: StepResult, statistics: Mapping[str, TokenStats], step: int
    ) -> list[RolloutSample]:
        """Say what became of each group; returns the samples that were trained. Those of a skipped update were not."""
        made = [minibatch for minibatch, is_made in zip(minibatches, result.trained, strict=True) if is_made]
        skipped = [minibatch for minibatch, is_made in zip(minibatches, result.trained, strict=True) if not is_made]
        for parts, status in ((made, GroupStatus.TRAINED), (skipped, GroupStatus.FAILED)):
            if parts:
                groups = [group for part in parts for group in part.groups]
                self._source.close_groups(groups, status, step=step, stats=statistics)
        if made and skipped:
            logger.warning(
                "step %d: %d of %d minibatches were skipped: not finite", step, len(skipped), len(minibatches)
            )
        return [sample for minibatch in made for sample in minibatch.samples]

    def _check_finite(self, result: StepResult, step: int) -> None:
        if result.is_finite:
            self._bad_steps = 0
            return
        if math.isfinite(result.loss) and result.metrics.get("training/loss_scale", 1.0) > 1.0:
            logger.warning("step %d was skipped: gradients overflowed float16; the loss scale is halved", step)
            return
        self._bad_steps += 1
        logger.warning(
            "step %d was skipped: loss %s, gradient norm %s (%d consecutive)",
            step,
            result.loss,
            result.grad_norm,
            self._bad_steps,
        )
        if self._bad_steps >= _MAX_NONFINITE_STEPS:
            self._save_before_error(step)  # the weights are those of the last finite step
            raise RunError(
                f"{self._bad_steps} consecutive steps were not finite; step {step} had loss {result.loss} and gradient norm "
                f"{result.grad_norm}. Lower optimizer.lr, or look at sampling/importance_sampling_ratio/max in metrics.jsonl; "
                "if model.compute_dtype is float16, its range may be too small for this model: set bfloat16"
            )

    def save(self, step: int, *, wait: bool = False) -> None:
        """Begin to write checkpoint `step` on all ranks; training stands still while the tensors are copied, generation does not.
        The last one has to be written first, and old ones are removed after it. `wait`: until it is written.

        Raises:
            CheckpointError: this one, or the last one, could not be written.
        """
        context, activity = self._context, self.activity
        if step != self._saved_step:
            last = "waiting for the last checkpoint to be written"
            with activity.during(last, "wait for the last checkpoint", "checkpoint"):
                context.checkpoints.prepare(self.heartbeat)
            with activity.during(f"copying the checkpoint of step {step}", "copy checkpoint", "checkpoint", step=step):
                state = CheckpointState.of(
                    step,
                    self._source.resume_state(),
                    totals=self._meter.totals.as_dict(),
                    counters={
                        "bad_steps": self._bad_steps,
                        **({} if self._loss_scale is None else self._loss_scale.counters),
                    },
                )
                self._command_all(SaveCommand(step=step))
                context.checkpoints.begin(
                    step,
                    context.policy,
                    context.optimizer,
                    state,
                    reference=context.moving_reference,
                    on_written=self._on_saved,
                )
            self._saved_step = step
        if wait:
            this = f"waiting for the checkpoint of step {step} to be written"
            with activity.during(this, "wait for the checkpoint", "checkpoint", step=step):
                context.checkpoints.wait(self.heartbeat)

    def finish(self, step: int) -> None:
        """Write the last checkpoint and the exported model, and make the servers serve the last weights."""
        self.save(step, wait=True)
        context = self._context
        with self.activity.during("exporting the model", "export the model", "checkpoint"):
            self._command_all(ExportCommand())
            export_model(
                context.run_dir.model,
                context.policy,
                context.tokenizer,
                dtype=self._config.inference.dtype_in_use,
                adapter=context.run_dir.adapter,
                card=model_card(self._config, step=step),
                heartbeat=self.heartbeat,
            )
        if self._pushed_version != step:
            self.activity.begin("pushing the last weights")
            self.push(step)

    def stop_followers(self) -> None:
        self._command_all(StopCommand())

    def heartbeat(self) -> None:
        """Tell the other ranks, which wait with a deadline, that this one waits too."""
        self._command_all(WaitCommand())

    def _command_all(self, command: Command) -> None:
        self._context.channel.send([command] * self._context.num_ranks)


def _staleness(samples: Sequence[RolloutSample], trainer_version: int) -> Counter[int]:
    """Number of trained tokens by their staleness."""
    counts: Counter[int] = Counter()
    for sample in samples:
        versions, numbers = np.unique(sample.policy_versions[sample.loss_mask], return_counts=True)
        counts.update(dict(zip((trainer_version - versions).tolist(), numbers.tolist(), strict=True)))
    return counts
