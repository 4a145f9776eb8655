"""The rollout side as the trainer sees it: a thread that generates and scores, and a queue to take from.

Call `start` after the first weight push, and `close` in any case.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import Any, TypeVar

import uvloop

from grpo_async.buffer.group import describe as describe_in_flight
from grpo_async.buffer.resume import ResumeState
from grpo_async.buffer.sample_buffer import HEARTBEAT_S, Watch
from grpo_async.config import ExperimentConfig
from grpo_async.errors import RunError
from grpo_async.inference.client import InferenceClient
from grpo_async.records import GroupStatus, ScoredGroup, TokenStats
from grpo_async.rollout.metrics import group_metrics
from grpo_async.rollout.worker import RolloutWorker
from grpo_async.utils.concurrency import close_all
from grpo_async.utils.loop_thread import LoopThread, result_within
from grpo_async.utils.text import count

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_SHUTDOWN_TIMEOUT_S = 10.0  # the rollout thread's, to finish its tasks when the run stops
# Python's default is 5 ms: so long the training thread would wait at each of hundreds of operations while this one computes
_SWITCH_INTERVAL_S = 5e-5


class RolloutSource:
    """See the module's docstring."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        client: InferenceClient,
        worker: RolloutWorker,
        server_changes: Callable[[], int] = int,
        closing: Sequence[Callable[[], None]] = (),
        closing_on_loop: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """`server_changes` grows while servers come and go: a wait for samples is no stall then. `closing` are called at the end
        (worker pools of the reward functions); `closing_on_loop` run before that on the event loop (environments)."""
        self._config = config
        self._thread = LoopThread("rollout", uvloop.new_event_loop())
        self._worker = worker
        self._buffer = worker.buffer
        self._table = worker.table
        self._watch = Watch(
            timeout_s=config.training.queue_timeout_s,
            progress=lambda: self._table.num_events + server_changes() + self._evaluated_tokens(),
            describe=self.describe,
        )
        self._attention = threading.Event()
        self._closing = closing
        self._closing_on_loop = (*closing_on_loop, client.aclose)
        self._reserved: list[ScoredGroup] = []
        self._stopping = False
        self._has_started = False
        self._is_closed = False
        self._usual_switch_interval_s = sys.getswitchinterval()
        self._generation: Future[None] | None = None
        self._evaluation: Future[Any] | None = None
        self._evaluated_tokens: Callable[[], int] = lambda: 0  # an evaluation that holds back the next push is no stall

    def start(self) -> None:
        """Begin to generate. Call after the first weight push, so that no token is sampled from unknown weights.

        What was loaded until now is frozen for the garbage collector: collecting it stops every thread for a third of a second.
        """
        self._has_started = True
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._generation = self._thread.submit(self._worker.run())  # a loop has only weak references to its tasks
        self._generation.add_done_callback(self._on_generation_end)

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def interrupt(self) -> None:
        """Stop the run: the current and every later `take` returns None, and a running evaluation is cancelled."""
        self._stopping = True
        self._buffer.interrupt()
        evaluation = self._evaluation  # another thread may replace it
        if evaluation is not None:
            evaluation.cancel()

    def _on_generation_end(self, generation: Future[None]) -> None:
        if not generation.cancelled() and (error := generation.exception(timeout=0.0)) is not None:
            self._buffer.fail(error)

    def wake(self) -> None:
        """End the current or the next wait in `take`, and in `wait_for_change`. Thread-safe."""
        self._buffer.wake()
        self._attention.set()

    def take(self, num_groups: int, *, trainer_version: int) -> list[ScoredGroup] | None:
        """The groups of the next step: see SampleBuffer.take. None: not yet, or `is_stopping`; []: the data is at its end."""
        groups = self._buffer.take(num_groups, trainer_version=trainer_version, watch=self._watch)
        if groups is None:
            return None
        reserved, self._reserved = self._reserved, []
        return reserved if _ids(reserved) == _ids(groups) else self._worker.scorer.advantages.over_step(groups)

    def reserve(self, num_groups: int, *, trainer_version: int) -> list[ScoredGroup]:
        """The list that the next `take` will return, as SampleBuffer.reserve predicts it; [] where it cannot predict yet."""
        groups = self._buffer.reserve(num_groups, trainer_version=trainer_version)
        self._reserved = self._worker.scorer.advantages.over_step(groups)
        return self._reserved

    def describe(self) -> str:
        """Describe what is in flight. Thread-safe, also while the rollout thread hangs, like `task_stacks`."""
        running = "" if self._evaluation is None or self._evaluation.done() else "; an evaluation is running"
        num_failed = self._table.ledger()["groups"]["failed"]
        in_flight = describe_in_flight(self._table.started())
        return f"{in_flight}; {count(len(self._table.queued()), 'group')} queued, {num_failed} failed so far{running}"

    def task_stacks(self) -> str:
        return self._thread.task_stacks()

    def close_groups(
        self,
        groups: Sequence[ScoredGroup],
        status: GroupStatus,
        *,
        step: int,
        stats: Mapping[str, TokenStats] = MappingProxyType({}),
    ) -> None:
        for group in groups:
            mine = {s.rollout_id: stats[s.rollout_id] for s in group.samples if s.rollout_id in stats}
            self._worker.close_group(group.group, status, scored=group, step=step, stats=mine)

    def take_group_metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Of the groups taken, and those that became filtered or stale since the step before: call it once for each step."""
        pass_threshold = self._config.data.sampling.pass_threshold
        return group_metrics([*groups, *self._buffer.take_dropped()], pass_threshold=pass_threshold)

    def advance(self, version: int) -> None:
        self._thread.post(lambda: self._worker.on_version(version))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell reward functions the metrics of a finished step."""
        logged = dict(metrics)
        self._thread.post(lambda: self._worker.scorer.log(step, logged))

    def resume_state(self) -> ResumeState:
        """The rollout side at this instant; generation continues. Call it between two steps, after taken groups are closed. Once
        the run is about to end, the wait for the rollout thread is bounded by half of `launch.stop_timeout_s`."""
        timeout_s, setting = self._config.training.queue_timeout_s, "training.queue_timeout_s"
        stop_s = self._config.launch.stop_timeout_s / 2
        if self._stopping and stop_s < timeout_s:
            timeout_s, setting = stop_s, "launch.stop_timeout_s"

        async def read() -> ResumeState:
            return self._worker.resume_state()

        return result_within(
            self._thread.submit(read()),
            timeout_s=timeout_s,
            what="the rollout thread's state (something blocks its event loop: `run_in: process` frees it of a reward)",
            setting=setting,
        )

    def gauges(self) -> dict[str, float]:
        gauges = {"epoch": self._worker.epoch, **self._worker.stream.metrics()}
        for kind, counts in self._table.ledger().items():
            gauges.update({f"ledger/{kind}/{status}": float(number) for status, number in counts.items()})
        num_rollouts, num_tokens = self._table.take_stale()
        if num_rollouts:
            gauges["async/stale/mean_length"] = num_tokens / num_rollouts
        gauges.update(
            {f"failures/{kind.replace(': ', '/')}": float(n) for kind, n in self._worker.errors.counts.items()}
        )
        return gauges

    def tell_of_failures(self, tell: Callable[[str], None]) -> None:
        self._worker.errors.tell = tell

    def ledger_snapshot(self) -> dict[str, dict[str, int]]:
        return self._table.ledger()

    @property
    def served_version(self) -> int:
        return self._table.version

    def begin_evaluation(self, run: Coroutine[Any, Any, Result], *, num_tokens: Callable[[], int]) -> Future[Result]:
        """Start an evaluation of the served policy, alongside generation, on the same thread and servers. Its end wakes the
        thread that waits in `take` or `wait_for_change`; a request to stop cancels it. Only one may run at a time. `num_tokens`
        returns the number of tokens sampled for evaluations so far.
        """
        self._evaluated_tokens = num_tokens
        running = self._thread.submit(run)
        self._evaluation = running
        if self._stopping:  # may be set meanwhile by another thread
            running.cancel()
        running.add_done_callback(lambda _: self.wake())
        return running

    def wait_for_change(self) -> None:
        """Wait until `wake` is called, or for as long as the other ranks may go without a sign of life."""
        self._attention.wait(timeout=HEARTBEAT_S)
        self._attention.clear()

    def stop_generating(self) -> None:
        """Cancel the groups in flight and close the queued ones; the client stays usable (for a last evaluation)."""
        self._thread.cancel_all(timeout_s=_SHUTDOWN_TIMEOUT_S)
        self._close_queued()

    def _close_queued(self) -> None:
        """No step will see these groups."""
        for group in self._table.queued():
            status = GroupStatus.CANCELLED if group.samples else GroupStatus.FILTERED
            self._worker.close_group(group.group, status, scored=group)

    def close(self) -> None:
        """End the thread in bounded time, whatever it does. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        gc.unfreeze()
        sys.setswitchinterval(self._usual_switch_interval_s)
        timeout_s = _SHUTDOWN_TIMEOUT_S
        if self._thread.cancel_all(timeout_s=timeout_s):
            closing = self._thread.submit(close_all(self._closing_on_loop, timeout_s=timeout_s))
            wait([closing], timeout=timeout_s * len(self._closing_on_loop))  # in case one blocks the loop
        if self._has_started:  # a start that fails must leave the run's files untouched
            try:
                self._close_queued()  # `stop_generating` did not run after an error; the last groups may show its cause
            except RunError as error:
                logger.warning("%s", error)
        self._thread.stop()
        self._thread.thread.join(timeout_s)
        if self._thread.thread.is_alive():
            logger.warning(
                "the rollout thread did not end within %.0f s; it is abandoned "
                "(a reward or tool that blocks the event loop causes this)",
                timeout_s,
            )
        for close_now in self._closing:
            close_now()


def _ids(groups: Sequence[ScoredGroup]) -> list[int]:
    return [group.group_id for group in groups]
