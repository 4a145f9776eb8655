"""Rank 0 from the first connection to the first step: connect, restore, wait for a server, push, check. Then `trainer.loop`."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import asdict, replace

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks.preflight import PreflightContext, run_preflight
from grpo_async.errors import DeadlineError, RunError
from grpo_async.evaluation.evaluations import RunEvaluations
from grpo_async.inference.fleet import Fleet
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.machine import weights_host
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.tracking import MetricsWriter, Trackers, open_trackers
from grpo_async.trainer.connections import has_died, open_fleet
from grpo_async.trainer.loop import Trainer
from grpo_async.trainer.packed_step import Packer
from grpo_async.trainer.progress import StallWatch
from grpo_async.trainer.publish import Publisher
from grpo_async.trainer.report import Reporter, phase
from grpo_async.trainer.rollout_side import build_rollout_side
from grpo_async.trainer.saving import Saver
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.checkpoint import load_state, set_aside_later_checkpoints
from grpo_async.training.fingerprints import check_fingerprints, run_fingerprints
from grpo_async.training.optimizer import lr_factors
from grpo_async.training.pipeline import Activity
from grpo_async.training.ranks import StopCommand, TrainerContext
from grpo_async.training.step import NonfiniteSteps
from grpo_async.training.verify import probe_sequences
from grpo_async.utils.concurrency import call_when_set
from grpo_async.weights.buckets import choose_bucket_bytes
from grpo_async.weights.push import WeightTransport

logger = logging.getLogger(__name__)

_PREFLIGHTS = 3
"""Maximum number of preflights: if a server dies while it is checked, it is checked again when it is back."""


def run_rank_zero(
    assignment: Assignment, control: ControlClient, context: TrainerContext, renderer: ChatRenderer
) -> None:
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
        source = side.source
        stack.callback(source.close)
        source.tell_of_failures(lambda text: control.send("warning", text=text))
        config = context.config = side.config
        if step is not None:
            context.load(step)
            set_aside_later_checkpoints(run_dir, step)
            if side.next_seq is not None:  # only now: a start that fails must leave the run's files untouched
                store.supersede_from(side.next_seq, step=step)
        with phase("waiting for the server", control):
            fleet.start()
            is_up = _wait_until_up(fleet, control, context)
        if not is_up:  # stopped before anything was trained: there is nothing to save
            context.channel.send_all(StopCommand())
            return
        probes = probe_sequences(
            side.first_prompt_ids, vocab_size=len(renderer.tokenizer), max_model_len=config.inference.max_model_len
        )
        activity = Activity()
        sync = FleetSync(
            config,
            fleet,
            _open_transport(assignment, context, stack),
            context.parameters,
            probes=probes,
            control=control,
        )
        start = state.step if state else 0
        publisher = Publisher(context=context, sync=sync, fleet=fleet, source=source, activity=activity, version=start)
        log = stack.enter_context(MetricsWriter(run_dir.metrics, first_step=start + 1))
        is_run = assignment.purpose == "train"
        trackers = open_trackers(config, run_dir) if is_run else Trackers(())
        stack.push(lambda kind, *_: trackers.close(failed=kind is not None))
        for text in trackers.shown_by:
            control.send("note", text=text)
        evaluations = RunEvaluations(
            config,
            run_dir,
            source=source,
            evaluator=side.evaluator,
            start=start,
            control=control,
            trackers=trackers,
            hold=publisher.hold,
            shows_results=is_run,
        )
        stack.callback(evaluations.close)
        nonfinite = NonfiniteSteps(state.counters if state else {}, is_float16=config.model.compute_dtype == "float16")
        reporter = Reporter(
            context=context,
            control=control,
            fleet=fleet,
            source=source,
            evaluations=evaluations,
            log=log,
            trackers=trackers,
            activity=activity,
            start=start,
        )
        saver = Saver(
            context=context,
            source=source,
            log=log,
            nonfinite=nonfinite,
            evaluations=evaluations,
            activity=activity,
            fingerprints=fingerprints,
            saved_step=step,
        )
        trainer = Trainer(
            context=context,
            control=control,
            fleet=fleet,
            source=source,
            packer=Packer(context, source, store),
            sync=sync,
            publisher=publisher,
            evaluations=evaluations,
            nonfinite=nonfinite,
            lr_factor=lr_factors(config),
            reporter=reporter,
            saver=saver,
            activity=activity,
            start=start,
        )
        preflight = PreflightContext(
            config=config,
            run_dir=run_dir,
            renderer=renderer,
            servers=(),
            prompts=side.first_prompts,
            probes=probes,
            score_on_trainer=publisher.score,
            num_parameters=context.num_parameters,
            num_embeddings=num_embeddings,
            policy_version=start,
        )
        with phase("pushing the first weights", control):
            # also proves the transport before anything is generated
            is_pushed = _push_first(publisher, fleet, control, context)
        if is_pushed:
            fleet.subscribe(source.wake)
            with phase("checking trainer and servers against each other", control):
                engine = _check(preflight, publisher, fleet, control, context)
            call_when_set(control.stop_requested, source.interrupt)
            activity.begin("evaluating before training")
            with StallWatch(control, config, source=source, fleet=fleet, publisher=publisher, activity=activity):
                if is_run:
                    trainer.run(engine)
                else:
                    trainer.evaluate_before()
                    reporter.report_evaluation(engine)
        context.channel.send_all(StopCommand())


def _open_transport(assignment: Assignment, context: TrainerContext, stack: ExitStack) -> WeightTransport:
    settings = context.config.weights
    num_bytes = sum(spec.num_bytes for spec in context.parameters.specs)
    transport = WeightTransport(
        assignment.transport,
        host=weights_host(context.config, assignment.server_urls, assignment.node.own_address),
        bucket_bytes=choose_bucket_bytes(settings, num_bytes, device=context.device),
        timeout_s=settings.timeout_s,
        device=context.device,
    )
    stack.callback(transport.close)
    return transport


def _wait_until_up(fleet: Fleet, control: ControlClient, context: TrainerContext) -> bool:
    return fleet.wait_until_up(
        deadline_s=context.config.inference.startup_timeout_s,
        stop=control.stop_requested,
        heartbeat=context.channel.heartbeat,
    )


def _push_first(publisher: Publisher, fleet: Fleet, control: ControlClient, context: TrainerContext) -> bool:
    """Push until one server serves: the first may die between its readiness and the push. False when the run is to stop."""
    timeout_s = context.config.inference.startup_timeout_s
    ends_at = time.monotonic() + timeout_s
    while True:
        publisher.prove_delivery()
        publisher.push()
        if fleet.serving():
            return True
        if time.monotonic() > ends_at:
            raise DeadlineError(
                "an inference server to take the first weights",
                waited_s=timeout_s,
                setting="inference.startup_timeout_s",
                hint="trainer.log says why the pushes failed.",
            )
        if not _wait_until_up(fleet, control, context):
            return False


def _check(
    preflight: PreflightContext, publisher: Publisher, fleet: Fleet, control: ControlClient, context: TrainerContext
) -> str:
    """Check everything that would spoil the run; repeat this if a server died meanwhile. Returns the engine of the servers."""
    for attempt in range(1, _PREFLIGHTS + 1):
        while not (servers := fleet.serving()):  # the server has died since the push
            if not _push_first(publisher, fleet, control, context):
                return "unknown"
        checks = run_preflight(replace(preflight, servers=servers))
        failed = [f"{check.name}: {check.detail}" for check in checks if check.status == "fail"]
        dead = [server.name for server in servers if has_died(fleet, server)] if failed else []
        if not dead or attempt == _PREFLIGHTS:
            break
        logger.warning("%s died while it was checked; it is checked again", " and ".join(dead))
    control.send("preflight", checks=[asdict(check) for check in checks])
    if failed:
        raise RunError("the preflight found problems that would spoil the run:\n" + "\n".join(failed))
    return next(server.info.engine for server in servers if server.info)
