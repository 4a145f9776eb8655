"""Rank 0 from the first connection to the summary.

connect -> push the first weights -> preflight -> evaluate -> generate and train -> push, save, export -> evaluate -> summary
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from grpo_async.buffer.ledger import is_closed
from grpo_async.buffer.sample_buffer import HEARTBEAT_S
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks.doctor import machine_memory
from grpo_async.checks.memory import ADVICE, ModelSize, describe_peak, trainer_memory
from grpo_async.checks.preflight import PreflightContext, run_preflight
from grpo_async.checks.report import Check
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import DeadlineError, GrpoAsyncError, RunError
from grpo_async.evaluation.evaluations import Listeners, RunEvaluations
from grpo_async.findings import Evidence, Verdict, judge
from grpo_async.inference.fleet import Server
from grpo_async.inference.token import token_from_environment
from grpo_async.processes.addresses import weights_host
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.records import ScoredGroup
from grpo_async.run_directory import write_atomically
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.tracking import MetricsLog, Trackers, open_trackers
from grpo_async.tracking.timeline import NO_TIMELINE, Timeline
from grpo_async.trainer.connections import has_died, open_fleet
from grpo_async.trainer.example import example_of
from grpo_async.trainer.loop import LeaderLoop
from grpo_async.trainer.rollout_side import RolloutSide, build_rollout_side
from grpo_async.trainer.stall import StallGuard
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.checkpoint import load_state, load_tensors, prune, set_aside_later_checkpoints
from grpo_async.training.export import CARD, model_card
from grpo_async.training.metrics import CounterSnapshot, PipelineMeter, Totals
from grpo_async.training.ranks import StopCommand, TrainerContext
from grpo_async.training.timing import peak_bytes
from grpo_async.user_code.threads import call_when_set
from grpo_async.utils.run_state import FINISHED, STOPPED
from grpo_async.utils.text import format_bytes
from grpo_async.weights.buckets import choose_bucket_bytes
from grpo_async.weights.push import WeightTransport
from grpo_async.weights.verify import probe_sequences

logger = logging.getLogger(__name__)

_NUM_PROBES = 4
_PREFLIGHTS = 3
"""A server that dies while it is checked is checked again when it is back, this many times in all."""
_EXAMPLE_STEPS = 5
"""Number of steps between examples of what the policy writes; there is one after the first step, too."""
_LITTLE = 0.1  # of what a rank holds: with less left on its device the next longer batch may be one too many
_FAR_MORE = 1.5  # than an estimate that is good to about a third


def lead(
    assignment: Assignment,
    config: ExperimentConfig,
    control: ControlClient,
    context: TrainerContext,
    renderer: ChatRenderer,
    timeline: Timeline = NO_TIMELINE,
) -> None:
    """Run rank 0; everything it opened is closed when it returns or raises."""
    with ExitStack() as stack:
        _Leader(assignment, config, control, context, renderer, timeline, stack).run()


class _Leader:
    def __init__(
        self,
        assignment: Assignment,
        config: ExperimentConfig,
        control: ControlClient,
        context: TrainerContext,
        renderer: ChatRenderer,
        timeline: Timeline,
        stack: ExitStack,
    ) -> None:
        self._assignment = assignment
        self._config = config
        self._control = control
        self._context = context
        self._renderer = renderer
        self._timeline = timeline
        self._stack = stack
        self._phase: tuple[str, float] | None = None  # the current one, and when it began
        stack.callback(self._end_phase)
        self._state = (
            load_state(assignment.run_dir, assignment.resume_step) if assignment.resume_step is not None else None
        )
        self._fleet = open_fleet(config, assignment.server_urls, control, stack, timeline)
        self._engine = "unknown"
        self._start = self._state.step if self._state else 0
        self._side: RolloutSide  # this and what follows from `run` on
        self._evaluations: RunEvaluations
        self._meter: PipelineMeter
        self._loop: LeaderLoop
        self._guard: StallGuard

    def run(self) -> None:
        assignment, control, context = self._assignment, self._control, self._context
        side = self._side = self._build_rollout_side()
        config = self._config = context.config = side.config
        if assignment.resume_step is not None:
            step = assignment.resume_step
            load_tensors(
                assignment.run_dir,
                step,
                context.policy,
                context.optimizer,
                reference=context.moving_reference,
                seed=config.run.seed,
            )
            set_aside_later_checkpoints(assignment.run_dir, step)
            side.supersede()  # not before: a start that fails leaves the run's files as they are
        self._begin_phase("waiting for the server")
        self._fleet.start()
        is_ready = self._fleet.wait_for_members(
            deadline_s=config.inference.startup_timeout_s,
            setting="inference.startup_timeout_s",
            stop=control.stop_requested,
        )
        if not is_ready:  # stopped before anything was trained: there is nothing to save
            context.channel.send([StopCommand()] * assignment.world_size)
            return
        self._evaluations = self._build_evaluations()
        self._meter = PipelineMeter(self._read(), Totals(**self._state.totals) if self._state else None)
        loop = self._loop = self._build_loop()
        self._begin_phase("pushing the first weights")
        first_push = self._push_first()  # also proves the transport before anything is generated
        if first_push is None:
            loop.stop_followers()
            return
        self._fleet.subscribe(side.source.wake)
        self._check_before_training()
        if assignment.purpose == "preflight":
            loop.stop_followers()
            return
        call_when_set(control.stop_requested, side.source.interrupt)
        self._watch_for_stalls()
        self._evaluations.before_training()
        finished = self._train()
        self._write_summary(finished)
        self._guard.check()

    def _begin_phase(self, name: str) -> None:
        """The launcher is told what rank 0 does, and the timeline for how long. Ends the phase before."""
        self._end_phase()
        self._phase = name, time.time()
        self._control.send("phase", name=name)

    def _end_phase(self) -> None:
        if self._phase is not None:
            name, began = self._phase
            self._timeline.add(name, "run", began, time.time())
            self._phase = None

    def _build_rollout_side(self) -> RolloutSide:
        store = self._stack.enter_context(
            RolloutStore(self._assignment.run_dir.rollouts, settings=self._config.record.rollouts)
        )
        side = build_rollout_side(
            self._config,
            fleet=self._fleet,
            renderer=self._renderer,
            store=store,
            state=self._state,
            timeline=self._timeline,
        )
        self._stack.callback(side.source.close)
        return side

    def _build_evaluations(self) -> RunEvaluations:
        evaluations = RunEvaluations(
            self._config,
            self._assignment.run_dir,
            source=self._side.source,
            evaluator=self._side.evaluator,
            start=self._start,
            listeners=Listeners(
                tell=lambda when, metrics: self._control.send("evaluation", when=when, metrics=dict(metrics)),
                track=lambda step, metrics: self._trackers.log(step, metrics),
                phase=lambda name: self._control.send("phase", name=name),
                heartbeat=lambda: self._loop.heartbeat(),
                on_change=lambda: self._loop.push_if_needed(),
            ),
            timeline=self._timeline,
        )
        self._stack.callback(evaluations.close)
        return evaluations

    def _build_loop(self) -> LeaderLoop:
        config, context = self._config, self._context
        log = self._stack.enter_context(MetricsLog(self._assignment.run_dir.metrics, first_step=self._start + 1))
        transport = WeightTransport(
            self._assignment.transport,
            host=weights_host(config, self._assignment.server_urls),
            bucket_bytes=choose_bucket_bytes(
                config.weights,
                sum(spec.num_bytes for spec in context.parameters.specs),
                device=context.device,
            ),
            timeout_s=config.weights.timeout_s,
            device=context.device,
            base=context.parameters.base,
        )
        self._stack.callback(transport.close)
        sync = FleetSync(
            config,
            self._fleet,
            transport,
            context.parameters,
            probes=self._probes(),
            on_serving=lambda server: self._control.send("server_serving", index=server.index),
            timeline=self._timeline,
        )
        is_run = self._assignment.purpose == "train"  # a preflight is no run that anybody wants to see in a tracker
        trackers = self._trackers = open_trackers(config, self._assignment.run_dir) if is_run else Trackers(())
        self._stack.push(lambda kind, *_: trackers.close(failed=kind is not None))

        for text in trackers.shown_by:
            self._control.send("note", text=text)

        def on_step(step: int, metrics: dict[str, float], groups: Sequence[ScoredGroup]) -> None:
            metrics |= {**self._fleet.metrics(), "perf/peak_memory_bytes": float(peak_bytes(context.device))}
            log.write(step, metrics)
            trackers.log(step, metrics)
            self._control.send("step", step=step, max_steps=config.num_steps, metrics=metrics)
            if (step == self._start + 1 or step % _EXAMPLE_STEPS == 0) and (example := example_of(groups)):
                self._control.send("example", step=step, **example)
            if "eval/step" in metrics and config.tracking:
                self._track_evaluation(step)
            if step == self._start + 1:
                self._tell_memory(step)

        return LeaderLoop(
            context,
            source=self._side.source,
            sync=sync,
            read=self._read,
            on_step=on_step,
            meter=self._meter,
            resumed=self._state,
            evaluations=self._evaluations,
            on_saved=self._prune,
            timeline=self._timeline,
        )

    def _prune(self) -> None:
        """Called by the thread that writes checkpoints."""
        # first the step: what is evaluated no more has its score
        evaluated_now = self._evaluations.running_step
        section = self._config.checkpoint
        scores = self._evaluations.scores(section.best_metric)
        prune(self._assignment.run_dir, section, scores=scores, evaluated_now=evaluated_now)

    def _probes(self) -> list[list[int]]:
        """Token sequences on which trainer and servers are compared: prompts of this run, and noise."""
        prompts = [
            self._renderer.prompt_ids(prompt.messages, is_conversational=prompt.is_conversational)
            for prompt in self._side.first_prompts[:_NUM_PROBES]
            if prompt.messages  # those of an environment may begin empty
        ]
        return probe_sequences(
            prompts,
            vocab_size=len(self._renderer.tokenizer),
            max_model_len=self._config.inference.max_model_len,
        )

    def _push_first(self) -> dict[str, float] | None:
        """Until one server serves: the first may die between its readiness and the push. Metrics of the push; None when the run is
        to stop.

        Raises:
            DeadlineError: nobody serves within inference.startup_timeout_s.
        """
        ends_at = time.monotonic() + self._config.inference.startup_timeout_s
        while True:
            metrics = self._loop.push(self._start)
            if self._fleet.serving():
                return metrics
            if time.monotonic() > ends_at:
                raise DeadlineError(
                    "an inference server to take the first weights",
                    waited_s=self._config.inference.startup_timeout_s,
                    setting="inference.startup_timeout_s",
                    hint="trainer.log says why the pushes failed.",
                )
            if not self._await_server():
                return None

    def _check_before_training(self) -> None:
        """Check everything that would spoil the run; again when a server died meanwhile.

        Raises:
            RunError: something would.
        """
        self._begin_phase("checking trainer and servers against each other")
        for attempt in range(1, _PREFLIGHTS + 1):
            while not (servers := self._fleet.serving()):  # it has died since the push
                if self._push_first() is None:
                    return
            checks = self._preflight(servers)
            failed = [f"{check.name}: {check.detail}" for check in checks if check.status == "fail"]
            dead = [server.name for server in servers if has_died(self._fleet, server)] if failed else []
            if not dead or attempt == _PREFLIGHTS:
                break
            logger.warning("%s died while it was checked; it is checked again", " and ".join(dead))
        self._end_phase()
        self._control.send("preflight", checks=[asdict(check) for check in checks])
        if failed:
            raise RunError("the preflight found problems that would spoil the run:\n" + "\n".join(failed))

    def _preflight(self, servers: Sequence[Server]) -> list[Check]:
        context = self._context
        self._engine = next(server.info.engine for server in servers if server.info)
        preflight = PreflightContext(
            config=self._config,
            run_dir=self._assignment.run_dir,
            renderer=self._renderer,
            servers=servers,
            prompts=self._side.first_prompts,
            probes=self._probes(),
            score_on_trainer=self._loop.score,
            parameter_shapes={spec.name: spec.shape for spec in context.parameters.specs},
            num_embeddings=context.policy.model.get_input_embeddings().num_embeddings,
            policy_version=self._start,
            device=context.device.type,
            token=token_from_environment(),
            tool_sets=self._side.tool_sets,
        )
        return run_preflight(preflight)

    def _await_server(self) -> bool:
        """Wait until a server is up, telling the other ranks; False when the run is to stop.

        Raises:
            DeadlineError: none within inference.startup_timeout_s.
            RunError: all were given up.
        """
        ends_at = time.monotonic() + self._config.inference.startup_timeout_s
        while True:
            slice_s = min(HEARTBEAT_S, ends_at - time.monotonic())
            try:
                return self._fleet.wait_for_members(
                    deadline_s=max(0.0, slice_s),
                    setting="inference.startup_timeout_s",
                    stop=self._control.stop_requested,
                )
            except DeadlineError:
                if time.monotonic() >= ends_at:
                    raise
                self._loop.heartbeat()

    def _train(self) -> int:
        """Generate and train until the last step or a request to stop; returns the finished steps."""
        source, loop = self._side.source, self._loop
        self._begin_phase("training")
        self._meter.restart(self._read())
        source.start()
        finished = loop.run(first_step=self._start + 1)
        self._begin_phase("saving")
        loop.activity.begin("ending the run")
        if not loop.is_complete:
            loop.save(finished, wait=True)  # before generation is stopped: a resume continues what is in flight
            source.stop_generating()
        else:
            self._evaluations.end_running(finished)
            source.stop_generating()
            try:
                self._await_server()
            except GrpoAsyncError as error:  # the model can be saved and exported without one
                logger.error("no inference server for the last weights: %s", error)
            loop.finish(finished)
            self._end_phase()
            loop.activity.begin("evaluating after training")
            self._evaluations.after_training(finished)
            self._complete_model_card(finished)
        loop.stop_followers()
        return finished

    def _complete_model_card(self, step: int) -> None:
        """The model was exported before the last evaluation."""
        summary = self._evaluations.summary()
        if summary is not None and summary["after"]:
            card = model_card(self._config, step=step, evaluation=summary["after"])
            write_atomically(self._assignment.run_dir.model / CARD, card)

    def _watch_for_stalls(self) -> None:
        guard = self._guard = StallGuard(
            self._assignment, self._config, self._control, source=self._side.source, loop=self._loop, fleet=self._fleet
        )
        self._loop.activity.begin("evaluating before training")
        guard.start()
        self._stack.callback(guard.stop)

    def _read(self) -> CounterSnapshot:
        """Without the tokens of evaluations; the time that the servers are busy includes them."""
        counters = self._fleet.read()
        return CounterSnapshot(
            time_s=time.monotonic(),
            generation_busy_s=counters.busy_s,
            generated_tokens=counters.generated_tokens - self._evaluations.num_tokens,
        )

    def _memory(self) -> dict[str, Any]:
        """What each rank has held at most by the end of its first step, and what was expected."""
        context = self._context
        config = context.policy.model.config.get_text_config().to_dict()
        size = ModelSize.of(config, sum(math.prod(spec.shape) for spec in context.parameters.specs))
        estimated = sum(trainer_memory(self._config, size).values())
        return {"peaks": list(context.peaks or ()), "estimated": estimated, "on_gpu": context.device.type == "cuda"}

    def _tell_memory(self, step: int) -> None:
        """Memory of the first step, compared with the plan; with a warning where it was far more, or where little is left."""
        memory = self._memory()
        text = f"memory of a trainer rank after step {step}: {describe_peak(**memory)}"
        logger.info(text)
        self._control.send("note", text=text)
        most, left = max(memory["peaks"]), machine_memory()[1]
        if memory["on_gpu"]:
            left = torch.cuda.mem_get_info(self._context.device)[0]
        if left < _LITTLE * most or (memory["on_gpu"] and most > _FAR_MORE * memory["estimated"]):
            self._control.send("warning", text=f"{text}; {format_bytes(left)} are left on its device; {ADVICE}")

    def _track_evaluation(self, step: int) -> Verdict:
        """Trackers get what evaluations that have ended generated, and whether the run learns by now, which is returned."""
        verdict = judge(Evidence.read(self._assignment.run_dir))
        self._trackers.log_completions(step, self._evaluations.take_completions())
        self._trackers.log_verdict(step, verdict.text)
        return verdict

    def _write_summary(self, steps: int) -> None:
        """summary.json, of a run that ends after `steps` finished steps."""
        run_dir, memory, ledger = self._assignment.run_dir, self._memory(), self._side.source.ledger_snapshot()
        has_model = self._loop.is_complete
        summary = {
            "status": FINISHED if has_model and not self._evaluations.owes_the_last else STOPPED,
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
            "ledger_closed": is_closed(ledger),
            "memory": memory,
        }
        write_atomically(run_dir.summary, json.dumps(summary, indent=2))
        self._control.send("summary", summary=summary)
