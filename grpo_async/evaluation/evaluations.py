"""The evaluations of a run: before the first step, during training every N steps, and after the last.

Nothing here waits: the trainer waits where it has to, until `is_over`, and calls `collect`. One runs at a time; one that becomes
due meanwhile is skipped, with a warning. Results are written to evaluations.jsonl, and are in the metrics of the next step as
`eval/...`; `eval/step` is the step after which the evaluation began. Its rollouts are in evaluations/step_N/. One that runs when
the process ends has no result; a run that resumes at its step repeats it.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.errors import message_of
from grpo_async.evaluation.evaluator import EvaluationTask, Evaluator
from grpo_async.evaluation.metrics import EvaluationResult, flat_metrics
from grpo_async.processes.control import ControlClient
from grpo_async.rollout.source import RolloutSource
from grpo_async.run_directory import RunDir
from grpo_async.store.rollout_store import SEAL_TIMEOUT_S, RolloutStore, all_groups
from grpo_async.tracking import Trackers
from grpo_async.tracking.evaluation_record import EvaluationRecord, When, read_evaluations, scores_by_step
from grpo_async.tracking.jsonl import keep_steps
from grpo_async.tracking.timeline import record
from grpo_async.utils.files import write_atomically

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    step: int
    when: When
    future: Future[EvaluationResult]
    store: RolloutStore
    began: float  # unix seconds


class RunEvaluations:
    """See the module's docstring. For the trainer's main thread; `scores` and `running_step` are thread-safe.

    Args:
        evaluator: None if the run has no evaluation; then every method does nothing.
        start: finished steps; records of later steps are dropped from the log.
        hold: called with an evaluation of one policy version (`pin_version`), until whose end no weights may be pushed.
        shows_results: whether `control` is told of them; the launcher of `eval` shows them itself."""

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: RunDir,
        *,
        source: RolloutSource,
        evaluator: Evaluator | None,
        start: int,
        control: ControlClient,
        trackers: Trackers,
        hold: Callable[[Future[Any]], None],
        shows_results: bool = True,
    ) -> None:
        self._config = config
        self._section = config.evaluation
        self._run_dir = run_dir
        self._source = source
        self._evaluator = evaluator
        self._baseline = None if evaluator is None else evaluator.majority_baseline
        self._start = start
        self._control = control
        self._trackers = trackers
        self._hold = hold
        self._shows_results = shows_results
        keep_steps(run_dir.evaluation_log, start)
        self.records = list(read_evaluations(run_dir.evaluation_log, []))
        """Records of this run and of those that it resumes, up to the step at which it began."""
        self._running: _Running | None = None
        self._unsealed: RolloutStore | None = None  # of the previous evaluation
        self._unreported: dict[str, float] = {}
        self._completions: list[Mapping[str, str | float | None]] = []
        self._num_skipped = 0
        self._num_failed = 0
        self.is_final_missing = False
        """Whether a stop cancelled the evaluation after training; a resume repeats it."""
        if evaluator is not None:
            for step in run_dir.evaluation_steps():  # those after `start` will be repeated
                if step > start:
                    shutil.rmtree(run_dir.evaluation(step), ignore_errors=True)

    @property
    def num_tokens(self) -> int:
        return 0 if self._evaluator is None else self._evaluator.num_tokens

    @property
    def running_step(self) -> int | None:
        running = self._running
        return None if running is None else running.step

    def scores(self, metric: str) -> dict[int, float]:
        return scores_by_step(self.records, metric)

    @property
    def is_over(self) -> bool:
        """Whether none is generating: the last one, if any, can be collected."""
        return self._running is None or self._running.future.done()

    def before_training(self) -> bool:
        """Evaluate the policy that training begins with. Returns whether to wait for it: the untrained policy is evaluated before
        the first step; after a resume, an evaluation that is due runs alongside training."""
        section, start = self._section, self._start
        if self._evaluator is None or section is None or any(record.step == start for record in self.records):
            return False
        if start == 0 and section.at_start:
            self._begin(start, when="before")
            return True
        if self._is_due(start):
            self._begin(start, when="during")
        return False

    def after_step(self, step: int, metrics: dict[str, float], *, is_served: bool) -> None:
        """`step` is done: add the result of an evaluation that has ended to its metrics, and start the one that is due, if the
        weights of this step are served (`is_served`). Never waits."""
        if self._evaluator is None or self._section is None:
            return
        if self.is_over:
            self.collect()
        if self._is_due(step):
            if self._running is not None:
                why = f"the evaluation of step {self._running.step} was still running"
                self._skip(step, why + "; evaluation.every_steps is too small for that")
            elif not is_served:
                self._skip(step, "no server had the weights of this step")
            else:
                self._begin(step, when="during")
        metrics.update(self._unreported)
        self._unreported = {}

    def _is_due(self, step: int) -> bool:
        """Whether an evaluation is due during training; after the last step the final policy is evaluated in any case."""
        every = None if self._section is None else self._section.every_steps
        return every is not None and step > 0 and step % every == 0 and step < self._config.num_steps

    def after_training(self, step: int) -> None:
        """Evaluate the final policy, which is served, after `step` steps, unless it has been: data that ends early may end at a
        step after which an evaluation was due. Wait for it, and `collect_last`."""
        if self._evaluator is None:
            return
        last = self.records[-1] if self.records else None
        if last is not None and last.step == step and last.when != "before" and last.metrics:
            self.records[-1] = last = replace(last, when="after")  # already recorded if the run was killed after it
            self._write_records()
            self._show(last)
            return
        self._begin(step, when="after")

    def collect(self, *, raise_failure: bool = False) -> None:
        """Record the result of the evaluation that has ended, if any. A failure is recorded and shown; with
        `raise_failure` it is raised."""
        running = self._running
        if running is None:
            return
        try:
            self._end(running, running.future.result(timeout=0.0))
        except CancelledError:
            self._end(running, None)
        except Exception as error:  # the error is logged and recorded
            self._fail(running, error)
            if raise_failure:
                raise

    def collect_last(self, step: int) -> None:
        """Collect the result after the last step, `step`: no later one reports it."""
        self.collect()
        if self._unreported:
            self._trackers.log(step, self._unreported)
            self._unreported = {}

    def summary(self) -> dict[str, Any] | None:
        if self._section is None:
            return None
        found = [record for record in self.records if record.metrics]
        last: dict[When, EvaluationRecord] = {record.when: record for record in found if record.when != "during"}
        baseline = {} if self._baseline is None else {"majority_baseline": self._baseline}
        return {
            **baseline,
            "before": last["before"].metrics if "before" in last else None,
            "during": [{"step": record.step, **record.metrics} for record in found if record.when == "during"],
            "after": last["after"].metrics if "after" in last else None,
            "group_by": self._section.group_by or ("source" if any(record.by_group for record in found) else None),
            "by_group": {when: record.by_group for when, record in last.items()},
        }

    def take_completions(self) -> list[Mapping[str, str | float | None]]:
        """Rows of EvaluationResult.completions of the evaluations that ended since the last call, for trackers."""
        taken, self._completions = self._completions, []
        return taken

    def close(self) -> None:
        """Close the rows of a cancelled evaluation, and seal those of the last one. Safe to call twice."""
        running, self._running = self._running, None
        if running is not None:
            running.future.cancel()
            running.store.close()
        self._seal(wait_s=SEAL_TIMEOUT_S)

    def _begin(self, step: int, *, when: When) -> None:
        evaluator, config = self._evaluator, self._config
        assert evaluator is not None
        assert self._section is not None
        max_in_flight = config.max_in_flight_evaluation
        if when != "during":
            self._control.send("phase", name="evaluating")
            max_in_flight = config.max_in_flight_evaluation_only
        folder = self._run_dir.evaluation(step)
        self._seal(wait_s=SEAL_TIMEOUT_S if folder.exists() else 0.0)  # must end before a rewrite
        shutil.rmtree(folder, ignore_errors=True)  # left by a cancelled evaluation
        store = RolloutStore(folder, settings=all_groups(config.record.rollouts))
        task = EvaluationTask(
            step=step,
            served_version=lambda: self._source.served_version,
            max_in_flight=max_in_flight,
            store=store,
            tell=self._tell_progress,
        )
        future = self._source.begin_evaluation(evaluator.run(task), num_tokens=lambda: evaluator.num_tokens)
        if self._section.pin_version:
            self._hold(future)
        self._running = _Running(step=step, when=when, future=future, store=store, began=time.time())
        logger.info("an evaluation begins after step %d, with at most %d rollouts in flight", step, max_in_flight)

    def _tell_progress(self, done: str) -> None:
        running = self._running
        if running is not None and running.when != "during":
            self._control.send("phase", name=f"evaluating: {done}")

    def _skip(self, step: int, why: str) -> None:
        logger.warning("the evaluation of step %d is skipped: %s", step, why)
        self._add(EvaluationRecord(step=step, when="during", skipped=why))
        self._num_skipped += 1
        self._unreported["eval/num_skipped"] = float(self._num_skipped)

    def _add(self, record: EvaluationRecord) -> None:
        self.records.append(record)
        self._write_records()

    def _write_records(self) -> None:
        lines = "".join(json.dumps(each.as_dict()) + "\n" for each in self.records)
        write_atomically(self._run_dir.evaluation_log, lines)

    def _fail(self, running: _Running, error: Exception) -> None:
        logger.exception("the evaluation of step %d failed", running.step, exc_info=error)
        message = message_of(error)
        self._control.send("warning", text=f"the evaluation of step {running.step} failed: {message}")
        self._add(EvaluationRecord(step=running.step, when=running.when, error=message))
        self._release(running)
        self._num_failed += 1
        self._unreported["eval/num_errors"] = float(self._num_failed)

    def _end(self, running: _Running, result: EvaluationResult | None) -> None:
        """Record the result. None: it was cancelled because the run stops; it is not recorded, so a resume repeats it."""
        if result is None:
            self._release(running)
            if running.when == "after":
                self.is_final_missing = True
                text = "stopped during the evaluation after training; --resume repeats it"
                self._control.send("warning", text=text)
            return
        if self._baseline is not None:
            result = replace(result, metrics={**result.metrics, "majority_baseline": self._baseline})
        record = EvaluationRecord(
            step=running.step,
            when=running.when,
            metrics=result.metrics,
            by_group=result.by_group,
            prompt_rewards=result.prompt_rewards,
        )
        self._add(record)
        self._release(running)  # only after the record: a checkpoint without a score or evaluation may be removed
        flat = self._show(record)
        self._unreported |= {f"eval/{name}": value for name, value in flat.items()}
        self._unreported["eval/step"] = float(running.step)
        self._completions += result.completions if self._config.tracking else ()

    def _show(self, record: EvaluationRecord) -> dict[str, float]:
        metrics = flat_metrics(record.metrics, record.by_group)
        if self._shows_results:
            self._control.send("evaluation", when=record.label, metrics=metrics)
        return metrics

    def _release(self, running: _Running) -> None:
        self._running = None
        record("evaluation", running.began, time.time(), step=running.step, when=running.when)
        running.store.close(seal_wait_s=0.0)  # the trainer's thread must not wait
        self._unsealed = running.store

    def _seal(self, *, wait_s: float) -> None:
        store, self._unsealed = self._unsealed, None
        if store is not None:
            store.close(seal_wait_s=wait_s)
