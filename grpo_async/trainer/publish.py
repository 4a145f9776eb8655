"""When the servers get the trainer's weights. A push is made by the trainer's main thread, between two steps or while it waits.

after a step     push_after_step   every `weight_sync_steps` steps, and after the last
while it waits   push_if_due       servers joined, or the evaluation that held a push back is over
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from grpo_async.inference.fleet import Fleet
from grpo_async.rollout.source import RolloutSource
from grpo_async.tracking.timeline import record
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.pipeline import Activity
from grpo_async.training.ranks import ExchangeCommand, ScoreCommand, TrainerContext
from grpo_async.training.verify import TrainerScores


@dataclass(slots=True, kw_only=True)
class Publisher:
    """See the module's docstring. `version` is that of the weights in this process: the number of finished steps."""

    context: TrainerContext
    sync: FleetSync
    fleet: Fleet
    source: RolloutSource
    activity: Activity
    version: int
    _held_by: Future[Any] | None = None
    _is_overdue: bool = False  # a push was held back

    @property
    def served_version(self) -> int | None:
        """The version of the last complete push."""
        return self.sync.served_version

    def hold(self, until: Future[Any]) -> None:
        """Push nothing until `until` is done, except if no server serves: it evaluates a single version (`pin_version`)."""
        self._held_by = until

    @property
    def is_held(self) -> bool:
        return self._held_by is not None and not self._held_by.done()

    def push(self) -> dict[str, float]:
        """Push the current weights, on all ranks, and verify them if that is due. Returns metrics. With no server up, training goes
        on with the queued groups; the weights follow as soon as one is up (`push_if_due`)."""
        version, self._is_overdue = self.version, False
        activity = f"pushing version {version} to the servers"
        with self.activity.during(activity, "wait for the push", "pushing", version=version):
            metrics = self.sync.push(version, send_to_ranks=self.context.channel.send_all)
        if metrics is None:
            return {"sync/skipped": 1.0}
        began = time.time()
        if verified := self.sync.verify(self.score):
            record("verify weights", began, time.time())
        self.source.advance(version)
        return metrics | verified

    def prove_delivery(self) -> None:
        """Push weights far from those that the servers were started with, and compare: a server that goes on with the old ones, or
        with packed copies of some, would pass every later comparison. The next push brings the true weights.

        Raises:
            RunError: a server does not compute with what is pushed."""
        if not self.context.config.weights.verify_every_pushes:
            return
        self._exchange()
        try:
            if self.sync.push(self.version, send_to_ranks=self.context.channel.send_all) is not None:
                self.sync.verify(self.score, is_proof=True)
        finally:
            self._exchange()

    def _exchange(self) -> None:
        self.context.channel.send_all(ExchangeCommand())
        self.context.exchange_weights()

    def push_after_step(self) -> dict[str, float]:
        """Push if it is due after the step of this version; returns metrics."""
        config, step = self.context.config, self.version
        if not (self._is_overdue or step % config.training.weight_sync_steps == 0 or step == config.num_steps):
            return {}
        if self.is_held:
            self._is_overdue = True
            return {"sync/held": 1.0}
        return self.push()

    def push_if_due(self) -> None:
        """While the trainer waits: push to servers that can serve again, and make the push that was held back. While one is held
        back and another server serves, servers that come back wait: a push goes to all."""
        if self.context.config.inference.urls:  # the launcher ends the run when its own are lost
            self.fleet.check_any_left()
        waits = self.is_held and self.version != self.served_version
        joins = self.fleet.has_ready and not (waits and self.fleet.serving())
        if joins or (self._is_overdue and not self.is_held):
            self.push()

    def score(self, sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
        """Log-probabilities of token sequences under the current weights, on all ranks; see training.verify."""
        self.context.channel.send_all(ScoreCommand(sequences=sequences, rounding=rounding))
        return self.context.score(sequences, rounding)
