"""Rank 0's main thread, from the first step to the last evaluation; the other ranks follow its commands (training.ranks).

wait for groups -> [pack] -> train, and pack the next -> close groups -> push -> report -> save       once for each step
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from grpo_async.errors import GrpoAsyncError, RunError
from grpo_async.evaluation.evaluations import RunEvaluations
from grpo_async.inference.fleet import Fleet
from grpo_async.processes.control import ControlClient
from grpo_async.records import GroupStatus, ScoredGroup, TokenStats
from grpo_async.rollout.source import RolloutSource
from grpo_async.tracking.timeline import record, span
from grpo_async.trainer.packed_step import PackedStep, Packer
from grpo_async.trainer.publish import Publisher
from grpo_async.trainer.report import Reporter, phase
from grpo_async.trainer.saving import Saver
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.pipeline import Activity, peak_flops, training_flops
from grpo_async.training.ranks import StepCommand, TrainerContext
from grpo_async.training.step import NonfiniteSteps, StepResult
from grpo_async.utils.seeds import seed_of

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Trains from finished step `start` on. See the module's docstring; `trainer.start` makes the parts."""

    context: TrainerContext
    control: ControlClient
    fleet: Fleet
    source: RolloutSource
    packer: Packer
    sync: FleetSync
    publisher: Publisher
    evaluations: RunEvaluations
    nonfinite: NonfiniteSteps
    lr_factor: Callable[[int], float]
    reporter: Reporter
    saver: Saver
    activity: Activity
    start: int
    is_complete: bool = False
    """Whether the run reached its last step, or the end of the data."""

    def run(self, engine: str) -> None:
        """Evaluate, train, save, export, evaluate, and write the summary. `engine`: that of the servers."""
        self.evaluate_before()
        with phase("training", self.control):
            self.source.start()
            step = self.train()
        with phase("saving", self.control):
            self.activity.begin("ending the run")
            if self.is_complete:
                self.finish(step)
            else:
                self.saver.save(step, wait=True)  # before generation stops: a resume continues the groups in flight
                self.source.stop_generating()
        if self.is_complete:
            self.activity.begin("evaluating after training")
            self.evaluations.after_training(step)
            self._await_evaluation()
            self.evaluations.collect_last(step)
            self.saver.add_evaluation_to_card(step)
        self.reporter.write_summary(step, is_complete=self.is_complete, engine=engine)

    def evaluate_before(self) -> None:
        if self.evaluations.before_training():
            self._await_evaluation()
            self.evaluations.collect(raise_failure=True)

    def train(self) -> int:
        """Train to the last step, the end of the data, or a request to stop; returns the number of finished steps."""
        config, source, publisher = self.context.config, self.source, self.publisher
        self.reporter.begin_training()
        for step in range(self.start + 1, config.num_steps + 1):
            self.activity.begin(f"in step {step}")
            self.context.checkpoints.poll()
            began = time.time()
            groups = self._wait_for_groups(step)
            if not groups:
                self.is_complete = groups is not None  # []: no data is left; None: the run is to stop
                return step - 1
            metrics = source.take_group_metrics(groups)
            self.sync.sleep_servers()
            with self.activity.during(f"training step {step}", "train", "training", step=step):
                packed = self.packer.pack(groups, step)
                result, statistics = self.train_step(packed, step)
            publisher.version = step
            failure = self.nonfinite.update(result, step)  # raised when the step is reported and saved
            outcomes = packed.outcomes(result.trained)
            with span("close groups", step=step):
                for status, closed in outcomes.items():
                    source.close_groups(closed, status, step=step, stats=statistics)
            try:
                metrics |= publisher.push_after_step()
            except RunError as error:
                failure = error
            self.reporter.measure(metrics, result, outcomes[GroupStatus.TRAINED], step)
            if failure is None:
                self.evaluations.after_step(step, metrics, is_served=publisher.served_version == step)
            with span("log", step=step):
                self.reporter.report(step, metrics, groups)
            if failure is not None:
                self.saver.save_before_error(step)
                raise failure
            record("step", began, time.time(), step=step, tokens=result.num_tokens)
            if step % config.checkpoint.every_steps == 0 and step < config.num_steps:
                self.saver.save(step)
        self.is_complete = True
        return max(self.start, config.num_steps)  # epochs may have become fewer since the checkpoint

    def finish(self, step: int) -> None:
        """Stop generating, write the last checkpoint and the model, and make the servers serve the last weights."""
        if not self.evaluations.is_over:
            self.control.send("phase", name="waiting for an evaluation to end")
        self._await_evaluation()
        self.evaluations.collect_last(step)
        self.source.stop_generating()
        try:
            self.fleet.wait_until_up(
                deadline_s=self.context.config.inference.startup_timeout_s,
                stop=self.control.stop_requested,
                heartbeat=self.context.channel.heartbeat,
            )
        except GrpoAsyncError as error:  # the model can be saved and exported without one
            logger.error("no inference server for the last weights: %s", error)
        self.saver.save(step, wait=True)
        self.saver.export(step)
        if self.publisher.served_version != step:
            self.activity.begin("pushing the last weights")
            self.publisher.push()

    def _wait_for_groups(self, step: int) -> list[ScoredGroup] | None:
        """The groups of a step, [] at the end of the data, None when the run is to stop. Servers that join meanwhile get weights.
        If generation has failed for good, the finished steps are saved before its error propagates."""
        num_groups = self.context.config.rollout.groups_per_step
        waiting = f"waiting for the samples of step {step}"
        try:
            with self.activity.during(waiting, "wait for samples", "waiting", step=step):
                while (groups := self.source.take(num_groups, trainer_version=step - 1)) is None:
                    if self.source.is_stopping:
                        return None
                    self.context.channel.heartbeat()
                    self.reporter.report_wait(step)
                    self.publisher.push_if_due()
                return groups
        except RunError:
            self.saver.save_before_error(step - 1)
            raise

    def _await_evaluation(self) -> None:
        """Wait until the evaluation that is running, if any, is over. Servers that join meanwhile get weights."""
        while not self.evaluations.is_over:
            self.source.wait_for_change()
            self.context.channel.heartbeat()
            self.publisher.push_if_due()

    def train_step(self, packed: PackedStep, step: int) -> tuple[StepResult, Mapping[str, TokenStats]]:
        """Run one step on all ranks. Returns its result, and the statistics of the tokens that are stored, by rollout id."""
        config, context = self.context.config, self.context
        commands = [
            StepCommand(
                lr=config.optimizer.lr * self.lr_factor(step - 1),
                seed=seed_of(config.run.seed, step, rank),
                token_capacity=packed.tokens.capacity,
                loss_scale=self.nonfinite.loss_scale,
                syncs_reference=config.loss.sync_ref_model and step % config.loss.ref_model_sync_steps == 0,
            )
            for rank in range(context.world_size)
        ]
        context.channel.send(commands)
        began = time.perf_counter()
        result = context.step(commands[0], before_sync=partial(self.packer.pack_next, step + 1))
        result.metrics.update(packed.metrics)
        peak = peak_flops(context.device, config.model.resolved_compute_dtype)
        if peak is not None:
            available = peak * context.world_size * (time.perf_counter() - began)
            computed = int(packed.metrics["training/computed_tokens"])
            flops = training_flops(context.policy.model, computed, result.num_tokens, packed.attention_pairs)
            result.metrics["perf/mfu"] = config.training.num_iterations * flops / available
        collected = result.token_statistics
        return result, {} if collected is None else packed.tokens.by_rollout(collected, result.trained)
