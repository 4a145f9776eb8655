"""Rank 0 from the first connection to the summary; the other ranks follow its commands (training.ranks).

    lead_ranks  connect -> restore -> wait for a server -> build the Leader's parts
    Leader      push the first weights -> check -> evaluate -> train -> save, export, push -> evaluate -> summary
    a step      take groups -> [pack] -> step, and pack the next -> close groups -> push weights -> log -> checkpoint

Version = finished optimizer steps.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from grpo_async.batching.minibatch import Minibatch
from grpo_async.buffer.ledger import is_balanced
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks.memory import describe_peak
from grpo_async.checks.preflight import PreflightContext, run_preflight
from grpo_async.checks.report import Check
from grpo_async.errors import DeadlineError, GrpoAsyncError, RunError
from grpo_async.evaluation.evaluations import Listeners, RunEvaluations
from grpo_async.findings import Diagnosis, RunHistory, diagnose
from grpo_async.inference.fleet import Fleet, Server
from grpo_async.inference.token import token_from_environment
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.machine import weights_host
from grpo_async.records import GroupStatus, RolloutSample, ScoredGroup, TokenStats
from grpo_async.rollout.source import RolloutSource
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.tracking import MetricsWriter, Trackers, open_trackers
from grpo_async.tracking.timeline import record, span
from grpo_async.trainer.connections import has_died, open_fleet
from grpo_async.trainer.example import example_of
from grpo_async.trainer.packed_step import PackedStep, divide_step
from grpo_async.trainer.progress import ProgressReporter
from grpo_async.trainer.rollout_side import build_rollout_side
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.checkpoint import (
    CheckpointState,
    load_state,
    prune,
    set_aside_later_checkpoints,
)
from grpo_async.training.export import CARD, model_card
from grpo_async.training.fingerprints import Fingerprints, check_fingerprints, run_fingerprints
from grpo_async.training.loss_scale import LossScale
from grpo_async.training.metrics import CounterSnapshot, PipelineMeter, Totals
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
from grpo_async.training.timing import Activity, peak_bytes
from grpo_async.training.verify import TrainerScores, probe_sequences
from grpo_async.utils.concurrency import call_when_set
from grpo_async.utils.files import write_atomically
from grpo_async.utils.run_state import FINISHED, STOPPED
from grpo_async.utils.seeds import seed_of
from grpo_async.weights.buckets import choose_bucket_bytes
from grpo_async.weights.push import WeightTransport

logger = logging.getLogger(__name__)

_PREFLIGHTS = 3
"""Maximum number of preflights: if a server dies while it is checked, it is checked again when it is back."""
_EXAMPLE_STEPS = 5
"""Number of steps between two examples of what the policy writes; the first step also has one."""
_MAX_NONFINITE_STEPS = 3  # in a row; each is skipped, then the run ends


def lead_ranks(assignment: Assignment, control: ControlClient, context: TrainerContext, renderer: ChatRenderer) -> None:
    """Run rank 0. Everything that it opened is closed when it returns or raises."""
    run_dir, step = assignment.run_dir, assignment.resume_step
    with ExitStack() as stack:
        fingerprints = run_fingerprints(context.config, renderer)
        state = load_state(run_dir, step) if step is not None else None
        if state is not None:
            check_fingerprints(state.fingerprints, fingerprints, step=state.step)
        fleet = open_fleet(context.config, assignment.server_urls, control, stack)
        store = stack.enter_context(RolloutStore(run_dir.rollouts, settings=context.config.record.rollouts))
        num_embeddings = context.policy.model.get_input_embeddings().num_embeddings
        side = build_rollout_side(
            context.config,
            fleet=fleet,
            renderer=renderer,
            vocab_size=num_embeddings,
            store=store,
            state=state,
        )
        stack.callback(side.source.close)
        side.source.tell_of_failures(lambda text: control.send("warning", text=text))
        config = context.config = side.config
        if step is not None:
            context.load(step)
            set_aside_later_checkpoints(run_dir, step)
            side.supersede()  # only now: a start that fails must leave the run's files untouched
        with _phase("waiting for the server", control):
            fleet.start()
            is_ready = fleet.wait_until_up(deadline_s=config.inference.startup_timeout_s, stop=control.stop_requested)
        if not is_ready:  # stopped before anything was trained: there is nothing to save
            context.channel.send([StopCommand()] * assignment.world_size)
            return
        start = state.step if state else 0
        is_run = assignment.purpose == "train"  # what an evaluation finds is shown by the launcher alone

        def tell(when: str, metrics: Mapping[str, float]) -> None:
            if is_run:
                control.send("evaluation", when=when, metrics=dict(metrics))

        evaluations = RunEvaluations(
            config,
            run_dir,
            source=side.source,
            evaluator=side.evaluator,
            start=start,
            listeners=Listeners(
                tell=tell,
                track=lambda step, metrics: trackers.log(step, metrics),
                phase=lambda name: control.send("phase", name=name),
                warn=lambda text: control.send("warning", text=text),
                heartbeat=lambda: leader.heartbeat(),
                on_change=lambda: leader.push_if_needed(),
            ),
        )
        stack.callback(evaluations.close)
        transport = WeightTransport(
            assignment.transport,
            host=weights_host(config, assignment.server_urls),
            bucket_bytes=choose_bucket_bytes(
                config.weights,
                sum(spec.num_bytes for spec in context.parameters.specs),
                device=context.device,
            ),
            timeout_s=config.weights.timeout_s,
            device=context.device,
        )
        stack.callback(transport.close)
        probes = probe_sequences(
            side.first_prompt_ids, vocab_size=len(renderer.tokenizer), max_model_len=config.inference.max_model_len
        )
        sync = FleetSync(
            config,
            fleet,
            transport,
            context.parameters,
            probes=probes,
            on_serving=lambda server: control.send("server_serving", index=server.index),
        )
        log = stack.enter_context(MetricsWriter(run_dir.metrics, first_step=start + 1))
        trackers = open_trackers(config, run_dir) if is_run else Trackers(())
        stack.push(lambda kind, *_: trackers.close(failed=kind is not None))
        for text in trackers.shown_by:
            control.send("note", text=text)
        leader = Leader(
            assignment,
            control,
            context,
            fleet=fleet,
            source=side.source,
            store=store,
            sync=sync,
            evaluations=evaluations,
            log=log,
            trackers=trackers,
            state=state,
            fingerprints=fingerprints,
        )

        def preflight(servers: Sequence[Server]) -> list[Check]:
            return run_preflight(
                PreflightContext(
                    config=config,
                    run_dir=run_dir,
                    renderer=renderer,
                    servers=servers,
                    prompts=side.first_prompts,
                    probes=probes,
                    score_on_trainer=leader.score,
                    num_parameters=context.num_parameters,
                    num_embeddings=num_embeddings,
                    policy_version=start,
                    token=token_from_environment(),
                )
            )

        leader.run(preflight)


@contextmanager
def _phase(name: str, control: ControlClient) -> Iterator[None]:
    """Tell the launcher what rank 0 does, and record it in the timeline."""
    control.send("phase", name=name)
    with span(name):
        yield


class Leader:
    """See the module's docstring.

    Args:
        context: this rank's context.
        fleet: the servers, at least one of which is up.
        source: the source of samples.
        store: stores the rollouts.
        sync: pushes the weights to the servers.
        log, trackers: receive the metrics of each step.
        state: the checkpoint that this run resumes from.
        fingerprints: kept in checkpoints.
    """

    def __init__(
        self,
        assignment: Assignment,
        control: ControlClient,
        context: TrainerContext,
        *,
        fleet: Fleet,
        source: RolloutSource,
        store: RolloutStore,
        sync: FleetSync,
        evaluations: RunEvaluations,
        log: MetricsWriter,
        trackers: Trackers,
        state: CheckpointState | None,
        fingerprints: Fingerprints,
    ) -> None:
        self._assignment = assignment
        self._fingerprints = fingerprints
        self._control = control
        self._context = context
        self._config = context.config
        self._fleet = fleet
        self._source = source
        self._store = store
        self._sync = sync
        self._evaluations = evaluations
        self._log = log
        self._trackers = trackers
        self._start = state.step if state else 0
        self._engine = "unknown"
        self._lr_factor = lr_factors(context.config)
        self._meter = PipelineMeter(self._read_counters(), Totals(**state.totals) if state else None)
        counters = state.counters if state else {}
        bad_steps = counters.get("bad_steps", 0)
        # at the limit the run ended before: the next non-finite step would end it at once again
        self._bad_steps = bad_steps if bad_steps < _MAX_NONFINITE_STEPS else 0
        is_half = self._config.model.compute_dtype == "float16"
        self._loss_scale = LossScale(counters) if is_half else None
        self._next: PackedStep | None = None  # packed while the step before it was trained
        self._push_is_held = False  # by an evaluation; the push follows when it is over
        self._pushed_version = -1
        self._saved_step = state.step if state else None
        self._is_complete = False  # the run reached its last step, or the end of the data
        self.version = 0
        """Version of the weights in this process: the number of finished steps."""
        self.activity = Activity()

    def run(self, preflight: Callable[[Sequence[Server]], list[Check]]) -> None:
        """Do everything from the first push on.

        Args:
            preflight: compares trainer and servers.
        """
        with _phase("pushing the first weights", self._control):
            is_pushed = self._push_first()  # also proves the transport before anything is generated
        if is_pushed:
            self._fleet.subscribe(self._source.wake)
            self._check_before_training(preflight)
        if not is_pushed:
            self._command_all(StopCommand())
            return
        call_when_set(self._control.stop_requested, self._source.interrupt)
        self.activity.begin("evaluating before training")
        progress = ProgressReporter(
            self._assignment,
            self._config,
            source=self._source,
            fleet=self._fleet,
            version=lambda: self.version,
            activity=self.activity,
        )
        progress.start()
        try:
            self._evaluations.before_training()
            if self._assignment.purpose == "evaluation":
                self._end_evaluation()
            else:
                self._write_summary(self._train_and_save())
        finally:
            progress.stop()

    def _push_first(self) -> bool:
        """Push until one server serves: the first may die between its readiness and the push. False when the run is to stop."""
        ends_at = time.monotonic() + self._config.inference.startup_timeout_s
        while True:
            self.push(self._start)
            if self._fleet.serving():
                return True
            if time.monotonic() > ends_at:
                raise DeadlineError(
                    "an inference server to take the first weights",
                    waited_s=self._config.inference.startup_timeout_s,
                    setting="inference.startup_timeout_s",
                    hint="trainer.log says why the pushes failed.",
                )
            if not self._await_server():
                return False

    def _check_before_training(self, preflight: Callable[[Sequence[Server]], list[Check]]) -> None:
        """Check everything that would spoil the run; repeat this if a server died meanwhile."""
        with _phase("checking trainer and servers against each other", self._control):
            for attempt in range(1, _PREFLIGHTS + 1):
                while not (servers := self._fleet.serving()):  # the server has died since the push
                    if not self._push_first():
                        return
                self._engine = next(server.info.engine for server in servers if server.info)
                checks = preflight(servers)
                failed = [f"{check.name}: {check.detail}" for check in checks if check.status == "fail"]
                dead = [server.name for server in servers if has_died(self._fleet, server)] if failed else []
                if not dead or attempt == _PREFLIGHTS:
                    break
                logger.warning("%s died while it was checked; it is checked again", " and ".join(dead))
        self._control.send("preflight", checks=[asdict(check) for check in checks])
        if failed:
            raise RunError("the preflight found problems that would spoil the run:\n" + "\n".join(failed))

    def _await_server(self) -> bool:
        """Wait until a server is up, with heartbeats to the other ranks. See Fleet.wait_until_up."""
        return self._fleet.wait_until_up(
            deadline_s=self._config.inference.startup_timeout_s,
            stop=self._control.stop_requested,
            heartbeat=self.heartbeat,
        )

    def _train_and_save(self) -> int:
        """Generate and train until the last step or a request to stop; returns the finished steps."""
        source = self._source
        with _phase("training", self._control):
            self._meter.restart(self._read_counters())
            source.start()
            finished = self.train()
        with _phase("saving", self._control):
            self.activity.begin("ending the run")
            if not self._is_complete:
                self.save(finished, wait=True)  # before generation stops: a resume continues the groups in flight
                source.stop_generating()
            else:
                self._evaluations.end_running(finished)
                source.stop_generating()
                try:
                    self._await_server()
                except GrpoAsyncError as error:  # the model can be saved and exported without one
                    logger.error("no inference server for the last weights: %s", error)
                self.finish(finished)
        if self._is_complete:
            self.activity.begin("evaluating after training")
            self._evaluations.after_training(finished)
            summary = self._evaluations.summary()
            if summary is not None and summary["after"]:  # the model card was written before the last evaluation
                card = model_card(self._config, step=finished, evaluation=summary["after"])
                write_atomically(self._context.run_dir.model / CARD, card)
        self._command_all(StopCommand())
        return finished

    def _end_evaluation(self) -> None:
        """End a run of zero steps: tell the launcher what the evaluation found, unless a stop cancelled it."""
        self._command_all(StopCommand())
        found = self._evaluations.summary()
        if found is not None and found["before"] is not None:
            self._control.send("summary", summary={"engine": self._engine, **found})

    def push(self, version: int) -> dict[str, float]:
        """Push the current weights as `version`, on all ranks. With no server up, training continues with the queued groups; the
        weights follow as soon as one is up (`push_if_needed`)."""

        def gather(bucket_bytes: int) -> None:
            self._command_all(GatherCommand(bucket_bytes=bucket_bytes))

        self.version = version
        self._push_is_held = False
        with self.activity.during(
            f"pushing version {version} to the servers", "wait for the push", "pushing", version=version
        ):
            metrics = self._sync.push(version, before_gather=gather)
        if metrics is None:
            return {"sync/skipped": 1.0}
        began = time.time()
        if verified := self._sync.verify(self.score):
            record("verify weights", began, time.time())
            metrics.update(verified)
        self._pushed_version = version
        self._source.advance(version)
        return metrics

    def _push_step(self, step: int, metrics: dict[str, float]) -> RunError | None:
        """Push after a step. Return the error if that fails for good: the run ends by it, once the step is in metrics.jsonl and
        saved."""
        try:
            metrics.update(self.push(step))
        except RunError as error:
            return error
        return None

    def push_if_needed(self) -> None:
        """Something changed while this thread waited: push the weights to servers that can serve again, and make the push that an
        evaluation has delayed. While an evaluation delays it and another server serves, servers that come back wait: a push goes
        to all."""
        is_held = self._evaluations.blocks_push and self.version != self._pushed_version
        if self._config.inference.urls:  # the launcher ends the run when its own are lost
            self._fleet.check_any_left()
        joins = self._fleet.has_ready and not (is_held and self._fleet.serving())
        if joins or (self._push_is_held and not self._evaluations.blocks_push):
            self.push(self.version)

    def score(self, sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
        """Log-probabilities of token sequences under the current weights, on all ranks; see training.reference."""
        self._command_all(ScoreCommand(sequences=sequences, rounding=rounding))
        return self._context.score(sequences, rounding)

    def train(self) -> int:
        """Train to the last step, the end of the data, or a request to stop; returns the number of finished steps.

        Raises:
            RunError: too many consecutive steps were not finite, generation died, a deadline passed.
        """
        config = self._config
        self.activity.take_seconds()  # time before training belongs to no step
        for step in range(self._start + 1, config.num_steps + 1):
            self.activity.begin(f"in step {step}")
            self._context.checkpoints.poll()
            began = time.time()
            groups = self._take(step)
            if not groups:
                self._is_complete = groups is not None
                return step - 1
            metrics = self._source.take_group_metrics(groups)
            self._sync.sleep_servers()
            with self.activity.during(f"training step {step}", "train", "training", step=step):
                packed, self._next = self._next, None
                if packed is None or packed.groups is not groups:
                    packed = self._pack(groups, step)
                result, statistics = self._train(packed, step)
            self.version = step
            with span("close groups", step=step):
                empty = [group for group in groups if not group.samples]
                self._source.close_groups(empty, GroupStatus.FILTERED, step=step)
                trained = self._close_groups(packed.minibatches, result, statistics, step)
            is_due = step % config.training.weight_sync_steps == 0 or step == config.num_steps
            failure: RunError | None = None
            if (is_due or self._push_is_held) and self._evaluations.blocks_push:
                self._push_is_held = True
                metrics["sync/held"] = 1.0
            elif is_due or self._push_is_held:
                failure = self._push_step(step, metrics)
            metrics.update(result.metrics)
            metrics.update(
                self._meter.step(
                    self._read_counters(),
                    trained_tokens=result.num_tokens,
                    staleness=_staleness(trained, step - 1),
                    reward=metrics.get("reward"),
                    spent=self.activity.take_seconds(),
                )
            )
            metrics.update(self._source.gauges())
            metrics.update(self._context.checkpoints.take_metrics())
            if self._push_is_held and not self._evaluations.blocks_push:  # the evaluation has ended since
                metrics.pop("sync/held", None)
                failure = self._push_step(step, metrics)
            if failure is None:
                self._evaluations.after_step(step, metrics, is_served=self._pushed_version == step)
            with span("log", step=step):
                self._report(step, metrics, groups)
            if failure is not None:
                self._save_before_error(step)
                raise failure
            record("step", began, time.time(), step=step, tokens=result.num_tokens)
            self._check_finite(result, step)
            if step % config.checkpoint.every_steps == 0 and step < config.num_steps:
                self.save(step)
        self._is_complete = True
        return max(self._start, config.num_steps)  # epochs may have become fewer since the checkpoint

    def _report(self, step: int, metrics: dict[str, float], groups: Sequence[ScoredGroup]) -> None:
        """A step is done: report it to log, trackers and launcher."""
        peak = float(peak_bytes(self._context.device))
        metrics |= {**self._fleet.metrics(), "perf/peak_memory_bytes": peak}
        self._log.write(step, metrics)
        self._source.log(step, metrics)
        self._trackers.log(step, metrics)
        self._control.send("step", step=step, max_steps=self._config.num_steps, metrics=metrics)
        is_first = step == self._start + 1
        if (is_first or step % _EXAMPLE_STEPS == 0) and (example := example_of(groups)):
            self._control.send("example", step=step, **example)
        if "eval/step" in metrics and self._config.tracking:
            self._track_evaluation(step)
        if is_first and self._context.peaks:
            self._report_memory(step)

    def _take(self, step: int) -> list[ScoredGroup] | None:
        """The groups of a step; see RolloutSource.take. If generation has failed for good, the finished steps are saved before
        its error propagates."""
        waiting = f"waiting for the samples of step {step}"
        try:
            with self.activity.during(waiting, "wait for samples", "waiting", step=step):
                return self._source.take(
                    self._config.rollout.groups_per_step,
                    trainer_version=step - 1,
                    heartbeat=partial(self._wait_for_samples, step),
                    on_change=self.push_if_needed,
                )
        except RunError:
            self._save_before_error(step - 1)
            raise

    def _wait_for_samples(self, step: int) -> None:
        self.heartbeat()
        groups = self._source.ledger_snapshot()["groups"]
        counts = ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in groups.items() if number)
        self._control.send("phase", name=f"training: step {step} waits for groups ({counts})")

    def _save_before_error(self, step: int) -> None:
        try:
            self.save(step, wait=True)
        except RunError:
            logger.exception("the steps since the last checkpoint could not be saved")  # the original error propagates

    def _pack(self, groups: Sequence[ScoredGroup], step: int) -> PackedStep:
        """Divide the groups of a step among the ranks, each of which packs its own."""
        config, context, began = self._config, self._context, time.time()
        has_stats = config.record.rollouts.token_stats
        packed, commands = divide_step(
            groups,
            config,
            world_size=context.world_size,
            trainer_version=step - 1,
            is_stored=lambda group_id: has_stats and self._store.stores(group_id, GroupStatus.TRAINED),
        )
        context.channel.send(commands)
        context.pack(commands[0])
        num_rows = sum(len(group.samples) for group in groups)
        record("plan and pack", began, time.time(), step=step, rows=num_rows)
        return packed

    def _pack_next(self, step: int) -> None:
        """Called while the device computes the step before: pack the next one, if its groups are there."""
        num_groups = self._config.rollout.groups_per_step
        if step <= self._config.num_steps and (groups := self._source.reserve(num_groups, trainer_version=step - 1)):
            self._next = self._pack(groups, step)
        else:
            self.heartbeat()  # the other ranks wait for one command in every step

    def _train(self, packed: PackedStep, step: int) -> tuple[StepResult, Mapping[str, TokenStats]]:
        """Run one step on all ranks. Returns its result, and the statistics of the tokens that are stored, by rollout id."""
        config, context = self._config, self._context
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale.value)
        commands = [
            StepCommand(
                lr=config.optimizer.lr * self._lr_factor(step - 1),
                seed=seed_of(config.run.seed, step, rank),
                token_capacity=packed.tokens.capacity,
                loss_scale=scale,
                syncs_reference=config.loss.sync_ref_model and step % config.loss.ref_model_sync_steps == 0,
            )
            for rank in range(context.world_size)
        ]
        context.channel.send(commands)
        result = context.step(commands[0], before_sync=lambda: self._pack_next(step + 1))
        if self._loss_scale is not None:
            result.metrics["training/loss_scale"] = scale
            self._loss_scale.update(result.updates)
        result.metrics["training/padding_fraction"] = packed.padding_fraction
        collected = result.token_statistics
        return result, {} if collected is None else packed.tokens.by_rollout(collected, result.trained)

    def _close_groups(
        self, minibatches: Sequence[Minibatch], result: StepResult, statistics: Mapping[str, TokenStats], step: int
    ) -> list[RolloutSample]:
        """Close each group with its status; returns the samples that were trained, without those of skipped updates."""
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
        """Begin to write checkpoint `step` on all ranks. Training pauses while the tensors are copied, generation does not. The
        previous checkpoint must be written first, and old ones are removed afterward. `wait`: return only when it is written.

        Raises:
            CheckpointError: this checkpoint, or the previous one, could not be written.
        """
        context, activity = self._context, self.activity
        if step != self._saved_step:
            last = "waiting for the last checkpoint to be written"
            with activity.during(last, "wait for the last checkpoint", "checkpoint"):
                context.checkpoints.prepare(self.heartbeat)
            self._log.sync()  # first: no checkpoint without the lines of its steps, whatever ends the run in between
            with activity.during(f"copying the checkpoint of step {step}", "copy checkpoint", "checkpoint", step=step):
                rollouts = self._source.resume_state()
                state = CheckpointState(
                    step=step,
                    rollouts=rollouts.small(),
                    lines=rollouts.lines(),
                    totals=asdict(self._meter.totals),
                    counters={
                        "bad_steps": self._bad_steps,
                        **({} if self._loss_scale is None else self._loss_scale.counters),
                    },
                    fingerprints=self._fingerprints,
                )
                self._command_all(SaveCommand(step=step))
                context.save(step, state, on_written=self._prune)
            self._saved_step = step
        if wait:
            this = f"waiting for the checkpoint of step {step} to be written"
            with activity.during(this, "wait for the checkpoint", "checkpoint", step=step):
                context.checkpoints.wait(self.heartbeat)

    def finish(self, step: int) -> None:
        """Write the last checkpoint and the exported model, and make the servers serve the last weights."""
        self.save(step, wait=True)
        with self.activity.during("exporting the model", "export the model", "checkpoint"):
            self._command_all(ExportCommand())
            self._context.export(card=model_card(self._config, step=step), heartbeat=self.heartbeat)
        if self._pushed_version != step:
            self.activity.begin("pushing the last weights")
            self.push(step)

    def _prune(self) -> None:
        """Remove old checkpoints. Called by the thread that writes them."""
        # read the step first: an evaluation that has ended since has its score
        evaluated_now = self._evaluations.running_step
        section = self._config.checkpoint
        scores = self._evaluations.scores(section.best_metric)
        prune(self._context.run_dir, section, scores=scores, evaluated_now=evaluated_now)

    def heartbeat(self) -> None:
        """Tell the other ranks, which wait with a deadline, that rank 0 is still waiting."""
        self._command_all(WaitCommand())

    def _command_all(self, command: Command) -> None:
        self._context.channel.send([command] * self._context.world_size)

    def _read_counters(self) -> CounterSnapshot:
        """Read the counters. They exclude tokens of evaluations, but include the time that servers are busy with them."""
        counters = self._fleet.read_counters()
        return CounterSnapshot(
            time_s=time.monotonic(),
            generation_busy_s=counters.busy_s,
            generated_tokens=counters.generated_tokens - self._evaluations.num_tokens,
        )

    def _memory_summary(self) -> dict[str, Any]:
        """Return the peak memory of each rank by the end of its first step."""
        return {"peaks": list(self._context.peaks or ()), "on_gpu": self._context.device.type == "cuda"}

    def _report_memory(self, step: int) -> None:
        text = f"memory of a trainer rank after step {step}: {describe_peak(**self._memory_summary())}"
        logger.info(text)
        self._control.send("note", text=text)

    def _track_evaluation(self, step: int) -> Diagnosis:
        """Give trackers the completions of evaluations that have ended. Return how the run stands by now."""
        diagnosis = diagnose(RunHistory.read(self._assignment.run_dir))
        self._trackers.log_completions(step, self._evaluations.take_completions())
        self._trackers.log_diagnosis(step, " ".join(diagnosis.lines))
        return diagnosis

    def _write_summary(self, steps: int) -> None:
        """Write summary.json of a run that ends after `steps` finished steps."""
        run_dir, memory, ledger = self._assignment.run_dir, self._memory_summary(), self._source.ledger_snapshot()
        has_model = self._is_complete
        summary = {
            "status": FINISHED if has_model and not self._evaluations.is_final_missing else STOPPED,
            "steps": steps,
            "model": str(run_dir.model) if has_model else None,
            "num_devices": self._assignment.world_size,
            "engine": self._engine,
            "on_gpu": memory.pop("on_gpu"),
            "server_failures": [
                {"server": failure.name, "reason": failure.reason, "recovery_s": failure.recovery_s}
                for failure in self._fleet.failures
            ],
            **self._meter.summary(),
            "learning": self._track_evaluation(steps).as_dict(),
            "evaluation": self._evaluations.summary(),
            "ledger": ledger,
            "ledger_closed": is_balanced(ledger),
            "memory": memory,
        }
        write_atomically(run_dir.summary, json.dumps(summary, indent=2))
        self._control.send("summary", summary=summary)


def _staleness(samples: Sequence[RolloutSample], trainer_version: int) -> Counter[int]:
    """Number of trained tokens by their staleness."""
    counts: Counter[int] = Counter()
    for sample in samples:
        versions, numbers = np.unique(sample.policy_versions[sample.loss_mask], return_counts=True)
        counts.update(dict(zip((trainer_version - versions).tolist(), numbers.tolist(), strict=True)))
    return counts
