"""Checkpoints and the exported model of a run, written by all ranks while rank 0 sends the others signs of life."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from grpo_async.errors import RunError
from grpo_async.evaluation.evaluations import RunEvaluations
from grpo_async.rollout.source import RolloutSource
from grpo_async.tracking import MetricsWriter
from grpo_async.training.checkpoint import CheckpointState, prune
from grpo_async.training.export import CARD, model_card
from grpo_async.training.fingerprints import Fingerprints
from grpo_async.training.pipeline import Activity
from grpo_async.training.ranks import ExportCommand, SaveCommand, TrainerContext
from grpo_async.training.step import NonfiniteSteps
from grpo_async.utils.files import write_atomically

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves what a resume needs: weights, optimizer, rollouts, counters; and exports the model."""

    context: TrainerContext
    source: RolloutSource
    log: MetricsWriter
    nonfinite: NonfiniteSteps
    evaluations: RunEvaluations
    activity: Activity
    fingerprints: Fingerprints
    saved_step: int | None

    def save(self, step: int, *, wait: bool = False) -> None:
        """Begin to write checkpoint `step` on all ranks. Training pauses while the tensors are copied, generation does not. The
        previous checkpoint must be written first, and old ones are removed afterward. `wait`: return only when it is written.
        """
        context, during = self.context, self.activity.during
        heartbeat = context.channel.heartbeat
        if step != self.saved_step:
            with during("waiting for the last checkpoint to be written", "wait for the last checkpoint", "checkpoint"):
                context.checkpoints.prepare(heartbeat)
            self.log.sync()  # first: no checkpoint without the lines of its steps, whatever ends the run in between
            with during(f"copying the checkpoint of step {step}", "copy checkpoint", "checkpoint", step=step):
                rollouts = self.source.resume_state()
                state = CheckpointState(
                    step=step,
                    rollouts=rollouts.small(),
                    lines=rollouts.lines(),
                    counters=self.nonfinite.counters,
                    fingerprints=self.fingerprints,
                )
                context.channel.send_all(SaveCommand(step=step))
                context.save(step, state, on_written=self._prune)
            self.saved_step = step
        if wait:
            text = f"waiting for the checkpoint of step {step} to be written"
            with during(text, "wait for the checkpoint", "checkpoint", step=step):
                context.checkpoints.wait(heartbeat)

    def save_before_error(self, step: int) -> None:
        """Save `step`, since an error is about to end the run, which stays the one that is raised."""
        try:
            self.save(step, wait=True)
        except RunError:
            logger.exception("the steps since the last checkpoint could not be saved")

    def export(self, step: int) -> None:
        with self.activity.during("exporting the model", "export the model", "checkpoint"):
            self.context.channel.send_all(ExportCommand())
            card = model_card(self.context.config, step=step)
            self.context.export(card=card, heartbeat=self.context.channel.heartbeat)

    def add_evaluation_to_card(self, step: int) -> None:
        """The model's card was written before the last evaluation."""
        summary = self.evaluations.summary()
        if summary is not None and summary["after"]:
            card = model_card(self.context.config, step=step, evaluation=summary["after"])
            write_atomically(self.context.run_dir.model / CARD, card)

    def _prune(self) -> None:
        # read the step first: an evaluation that has ended since has its score
        evaluated_now = self.evaluations.running_step
        section = self.context.config.checkpoint
        scores = self.evaluations.scores(section.best_metric)
        prune(self.context.run_dir, section, scores=scores, evaluated_now=evaluated_now)
