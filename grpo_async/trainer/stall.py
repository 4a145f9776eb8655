"""Handles a run that makes no progress (`training.stall_timeout_s`): reports what waits for what, saves if possible, ends the run.

    no step finished, no token generated -> message and stacks of all threads into the log
                                         -> the main thread's wait for samples raises RunError: it saves the finished steps and
                                            ends the process
                                         -> if it begins nothing new for launch.stop_timeout_s, it hangs: the thread of the
                                            StallGuard ends the process

Either way the exit code is 1, and the launcher gets the message. A process that was stopped (SIGSTOP), or in which some code
holds the GIL, cannot notice that itself: launcher.liveness does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import MAX_RESTART_DELAY_S
from grpo_async.errors import RunError
from grpo_async.inference.fleet import Fleet, Server, ServerState
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.heartbeat import RankFailure, report
from grpo_async.rollout.source import RolloutSource
from grpo_async.training.checkpoint import CheckpointWriter
from grpo_async.training.timing import Activity
from grpo_async.utils.concurrency import in_thread

logger = logging.getLogger(__name__)

_MAX_INTERVAL_S = 5.0
_CHECKS_PER_TIMEOUT = 10
_REPORT_S = 10.0
"""Time to write the last message before the process is killed, in case the disk or the launcher hangs, too."""


class StallGuard:
    """Watches a run from rank 0, from `start` to `stop`. Its thread continues when the main thread hangs in a collective or the
    rollout thread in a user's function.

    Args:
        assignment: where to write the failure.
        source: generated tokens, what is in flight, and how to interrupt a wait for samples.
        version: number of finished steps.
        activity: what the main thread is doing.
        checkpoints: whether one is being written, and how long that may take.
        fleet: tokens of evaluations, and whether servers are starting.
    """

    def __init__(
        self,
        assignment: Assignment,
        config: ExperimentConfig,
        control: ControlClient,
        *,
        source: RolloutSource,
        version: Callable[[], int],
        activity: Activity,
        checkpoints: CheckpointWriter,
        fleet: Fleet,
    ) -> None:
        self._assignment = assignment
        self._config = config
        self._control = control
        self._source = source
        self._version = version
        self._activity = activity
        self._checkpoints = checkpoints
        self._fleet = fleet
        self._error: RunError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-guard", daemon=True)

    def start(self) -> None:
        """Begin to watch. Call it when servers serve."""
        self._thread.start()

    def stop(self) -> None:
        """The run is over. A stall that was noticed before is still handled to its end."""
        self._ended.set()

    def _watch(self) -> None:
        timeout_s = self._config.training.stall_timeout_s
        interval_s = min(_MAX_INTERVAL_S, timeout_s / _CHECKS_PER_TIMEOUT)
        seen: object = None
        changed_at = slept_at = time.monotonic()
        while not self._ended.wait(timeout=interval_s):  # until `stop`; a daemon thread
            was_frozen = time.monotonic() - slept_at > interval_s + timeout_s / 2  # SIGSTOP: not a stall
            progress = self._progress()
            now = slept_at = time.monotonic()
            if progress != seen or was_frozen or self._is_excused():
                seen, changed_at = progress, now
            elif now - changed_at >= timeout_s:
                self._on_stall(now - changed_at)
                return

    def check(self) -> None:
        """Call this when everything is written.

        Raises:
            RunError: the run stalled at some time, even if it finished afterward.
        """
        if self._error is not None:
            raise self._error

    def _progress(self) -> object:
        """Changes while the run makes progress."""
        tokens = self._source.ledger_snapshot()["tokens"]["started"]
        # only the servers know the tokens of evaluations; the end of a run (save, export) shows in what the main thread begins
        return self._version(), tokens, self._fleet.read_counters().generated_tokens, self._activity.num_begun

    def _is_excused(self) -> bool:
        """Whether a server loads or is restarted: nothing else may be able to continue. The fleet has limits for that."""
        longest_s = self._config.inference.startup_timeout_s + MAX_RESTART_DELAY_S
        now = time.monotonic()
        return any(
            server.state in (ServerState.STARTING, ServerState.DOWN) and now - server.since < longest_s
            for server in self._fleet.servers()
        )

    def _on_stall(self, stalled_s: float) -> None:
        error = self._error = RunError(self._describe(stalled_s))
        _within(_REPORT_S, lambda: self._log(error))
        in_thread(lambda: self._end(error), name="stall-end")
        _within(_REPORT_S, lambda: self._source.fail(error))

    def _log(self, error: RunError) -> None:
        logger.error("%s", error)
        logger.error("the stacks of all threads:\n%s", thread_stacks())
        logger.error("where the tasks of the rollout thread wait:\n%s", self._source.task_stacks())

    def _end(self, error: RunError) -> None:
        """Wait for the main thread, which ends the process by itself when it can. It has the grace time for each thing it begins;
        writing a checkpoint has its own limit."""
        grace_s = self._config.launch.stop_timeout_s
        main = threading.main_thread()
        saved_by = time.monotonic() + self._checkpoints.longest_s
        num_begun = -1
        while main.is_alive():  # ends when the main thread begins nothing new
            saves = self._checkpoints.is_writing and time.monotonic() < saved_by
            if num_begun == self._activity.num_begun and not saves:
                break
            num_begun = self._activity.num_begun
            main.join(timeout=grace_s)
        message = f"{error} Its main thread did not end the process within launch.stop_timeout_s = {grace_s:g} s, so it was killed."
        _within(_REPORT_S, lambda: self._report(RunError(message)))
        os._exit(1)

    def _report(self, error: RunError) -> None:
        report(self._assignment.heartbeat_socket, RankFailure.of(self._assignment.rank, error))
        logger.error("%s", error)
        self._control.close()
        logging.shutdown()

    def _describe(self, stalled_s: float) -> str:
        """A paragraph on what waits for what."""
        now = time.monotonic()
        servers = self._fleet.servers()
        return (
            f"no step was finished and no token generated for {stalled_s:.0f} s; raise `training.stall_timeout_s` if this is "
            f"expected. The trainer has finished step {self._version()} and is {self._activity}. "
            f"{self._source.describe()}. Servers: {_servers(servers, now)}. "
            "The stacks of all threads are in trainer.log."
        )


def thread_stacks() -> str:
    """The stack of every thread of this process, the main thread first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            parts.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def _servers(servers: Sequence[Server], now: float) -> str:
    return "; ".join(f"{server.name} has been {server.state} for {now - server.since:.0f} s" for server in servers)


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Do `work` in a thread, but continue without it when it takes longer or fails."""
    for done in wait([in_thread(work, name="stall-report")], timeout=seconds).done:
        if (error := done.exception()) is not None:
            logger.error("%s", error, exc_info=error)
