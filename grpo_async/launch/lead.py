"""Rank 0 from the first connection to the summary.

connect -> push the first weights -> evaluate -> generate and train -> push, save, export -> evaluate -> summary
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from grpo_async.buffer.ledger import is_closed
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.inference.control import ServerControl
from grpo_async.inference.surface import ServerInfo, token_from_environment
from grpo_async.launch.assignment import Assignment
from grpo_async.launch.control import ControlClient
from grpo_async.launch.rollout_side import RolloutSide, build_rollout_side
from grpo_async.rundir import write_atomically
from grpo_async.store.rollout_store import RolloutStore
from grpo_async.tracking import MetricsLog, open_trackers
from grpo_async.training.checkpoint import load_state, load_tensors, set_aside_later_checkpoints
from grpo_async.training.loop import LeaderLoop, Workplace
from grpo_async.training.meter import PipelineMeter, Reading, Totals
from grpo_async.training.ranks import StopCommand
from grpo_async.weights.gloo_transport import GlooTransport
from grpo_async.weights.push import push_weights

logger = logging.getLogger(__name__)

_PUSH_MARGIN_S = 30.0


def lead(
    place: Assignment, config: ExperimentConfig, control: ControlClient, workplace: Workplace, renderer: ChatRenderer
) -> None:
    """Run rank 0; everything it opened is closed when it returns or raises."""
    with ExitStack() as stack:
        _Leader(place, config, control, workplace, renderer, stack).run()


class _Leader:
    def __init__(
        self,
        place: Assignment,
        config: ExperimentConfig,
        control: ControlClient,
        workplace: Workplace,
        renderer: ChatRenderer,
        stack: ExitStack,
    ) -> None:
        self._place = place
        self._config = config
        self._control = control
        self._workplace = workplace
        self._renderer = renderer
        self._stack = stack
        self._state = load_state(place.rundir, place.resume_step) if place.resume_step is not None else None
        self._progress: dict[str, Any] = dict(self._state.progress) if self._state else {}
        self._server = stack.enter_context(
            ServerControl(
                place.server_url, token=token_from_environment(), timeout_s=config.weights.timeout_s + _PUSH_MARGIN_S
            )
        )

    def run(self) -> None:
        config, control = self._config, self._control
        side = self._build_rollout_side()
        if self._place.resume_step is not None:
            workplace = self._workplace
            load_tensors(self._place.rundir, self._place.resume_step, workplace.policy, workplace.optimizer)
            set_aside_later_checkpoints(self._place.rundir, self._place.resume_step)
        control.send("phase", name="waiting for the server")
        info = self._server.wait_until_ready(
            deadline_s=config.inference.startup_timeout_s,
            setting="inference.startup_timeout_s",
            stop=control.stop_requested,
        )
        if info is None:  # stopped before anything was trained: there is nothing to save
            self._workplace.channel.send([StopCommand()] * self._place.world_size)
            return
        _check_server(info, config)
        start = self._state.step if self._state else 0
        totals = self._progress.pop("totals", None)
        meter = PipelineMeter(self._read(), Totals(**totals) if totals else None)
        loop = self._build_loop(side, meter, info, start)
        control.send("phase", name="pushing the first weights")
        loop.push(start)  # also proves the transport before anything is generated
        _call_when_set(control.stop_requested, side.source.interrupt)
        if "evaluation_before" not in self._progress:
            self._evaluate("before", side, start, loop)
        finished = self._train(side, loop, meter, start)
        self._write_summary(side, meter, info, finished)

    def _build_rollout_side(self) -> RolloutSide:
        store = RolloutStore(self._place.rundir.rollouts)
        self._stack.callback(store.close)
        side = build_rollout_side(
            self._config,
            server_url=self._place.server_url,
            renderer=self._renderer,
            store=store,
            state=self._state,
        )
        self._stack.callback(side.source.close)
        return side

    def _build_loop(self, side: RolloutSide, meter: PipelineMeter, info: ServerInfo, start: int) -> LeaderLoop:
        config, workplace = self._config, self._workplace
        log = MetricsLog(self._place.rundir.metrics, first_step=start + 1)
        self._stack.callback(log.close)
        transport = GlooTransport(
            self._server,
            host=config.weights.host,
            num_workers=info.num_workers,
            bucket_bytes=config.weights.bucket_mb << 20,
            timeout_s=config.weights.timeout_s,
        )
        self._stack.callback(transport.close)
        transport.connect()

        def push(version: int, before_gather: Callable[[], None]) -> dict[str, float]:
            report = push_weights(
                workplace.parameters,
                version=version,
                control=self._server,
                transport=transport,
                before_gather=before_gather,
            )
            return report.metrics()

        trackers = open_trackers(config, self._place.rundir)
        self._stack.callback(trackers.close)

        def on_step(step: int, metrics: dict[str, float]) -> None:
            log.write(step, metrics)
            trackers.log(step, metrics)
            self._control.send("step", step=step, max_steps=config.training.max_steps, metrics=metrics)

        return LeaderLoop(
            workplace,
            source=side.source,
            push=push,
            read=self._read,
            on_step=on_step,
            meter=meter,
            progress=self._progress,
            saved_step=self._place.resume_step,
        )

    def _train(self, side: RolloutSide, loop: LeaderLoop, meter: PipelineMeter, start: int) -> int:
        """Generate and train until the last step or a request to stop; returns the finished steps."""
        control, source = self._control, side.source
        control.send("phase", name="training")
        meter.restart(self._read())
        source.start()
        finished = loop.run(first_step=start + 1)
        control.send("phase", name="saving")
        if finished < self._config.training.max_steps:
            loop.save(finished)  # before generation is stopped: what is in flight is issued again by a resume
            source.stop_generating()
        else:
            source.stop_generating()
            loop.finish(finished)
            try:
                self._evaluate("after", side, finished, loop)
            except GrpoAsyncError as error:  # the model is trained, saved and exported: that is not undone by this
                logger.exception("the evaluation after training failed")
                self._control.send("phase", name=f"the evaluation after training failed: {error}")
        loop.stop_followers()
        return finished

    def _evaluate(self, when: str, side: RolloutSide, version: int, loop: LeaderLoop) -> None:
        if side.evaluator is None:
            return
        self._control.send("phase", name="evaluating")
        metrics = side.source.evaluate(side.evaluator, version=version, heartbeat=loop.heartbeat)
        if metrics is None:
            return
        self._progress[f"evaluation_{when}"] = metrics
        self._control.send("evaluation", when=when, metrics=metrics)

    def _read(self) -> Reading:
        info = self._server.info()
        return Reading(time_s=time.monotonic(), generation_busy_s=info.busy_s, generated_tokens=info.generated_tokens)

    def _write_summary(self, side: RolloutSide, meter: PipelineMeter, info: ServerInfo, steps: int) -> None:
        rundir = self._place.rundir
        is_finished = steps == self._config.training.max_steps
        ledger = side.source.ledger_snapshot()
        evaluation: dict[str, Any] | None = None
        if self._config.evaluation is not None:
            evaluation = {when: self._progress.get(f"evaluation_{when}") for when in ("before", "after")}
            if side.majority_baseline is not None:
                evaluation["majority_baseline"] = side.majority_baseline
        summary = {
            "status": "finished" if is_finished else "stopped",
            "steps": steps,
            "model": str(rundir.model) if is_finished else None,
            "num_devices": self._place.world_size,
            "engine": info.engine,
            **meter.summary(),
            "evaluation": evaluation,
            "ledger": ledger,
            "ledger_closed": is_closed(ledger),
        }
        write_atomically(rundir.summary, json.dumps(summary, indent=2))
        self._control.send("summary", summary=summary)


def _check_server(info: ServerInfo, config: ExperimentConfig) -> None:
    """Refuse a server that cannot serve this run; warn about a dtype that is not the configured one."""
    if info.max_model_len < config.inference.max_model_len:
        raise ConfigError(
            f"the server takes {info.max_model_len} tokens, inference.max_model_len is {config.inference.max_model_len}; "
            "start the server with this config, or lower the setting"
        )
    if info.dtype != config.inference.dtype:
        logger.warning(
            "the server serves %s, inference.dtype says %s: weights are sent as %s and cast by the server",
            info.dtype,
            config.inference.dtype,
            config.inference.dtype,
        )


def _call_when_set(event: threading.Event, function: Callable[[], None]) -> None:
    def wait() -> None:
        event.wait()
        function()

    threading.Thread(target=wait, name="stop-watch", daemon=True).start()
