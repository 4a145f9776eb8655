"""A failing tracker never fails the run, once it has been set up: a failed call only warns, and a slow one keeps nobody waiting,
because each tracker is called from its own thread. One that cannot be set up stops the run before it begins.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError, message_of
from grpo_async.run_directory import RunDir
from grpo_async.tracking.backends import TableRows, Tracker, open_tracker
from grpo_async.utils.files import numbers

logger = logging.getLogger(__name__)

_MAX_WAITING = 1000  # steps that a tracker may lag behind; then the newest are left out
_CLOSE_TIMEOUT_S = 10.0  # with the store's end it has to fit into launch.stop_timeout_s


class Trackers:
    """All trackers of a run, by the name of their type."""

    def __init__(self, trackers: Sequence[tuple[str, Tracker]], *, close_s: float = _CLOSE_TIMEOUT_S) -> None:
        self.shown_by = [f"{name}: {tracker.shown_by}" for name, tracker in trackers]
        """The command or the address that shows each."""
        self._close_s = close_s
        self._callers = [_Caller(name, tracker) for name, tracker in trackers]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a step's metrics to every tracker and return at once; values that are not finite are left out."""
        finite = numbers(metrics)
        self._call(step, lambda tracker: tracker.log(step, finite))

    def log_completions(self, step: int, rows: TableRows) -> None:
        """A table of what held-out prompts got. What a row lacks is empty there."""
        names = dict.fromkeys(name for row in rows for name in row)
        if rows:
            table = [{name: row.get(name) for name in names} for row in rows]
            self._call(step, lambda tracker: tracker.log_completions(step, table))

    def _call(self, step: int, function: Callable[[Tracker], None]) -> None:
        for caller in self._callers:
            caller.call(step, function)

    def close(self, *, failed: bool = False) -> None:
        """Let each write what it has, and end it. Allowed more than once. `failed`: the run ended with an error."""
        ends_at = time.monotonic() + self._close_s
        for caller in self._callers:
            caller.begin_close(failed=failed)
        for caller in self._callers:
            caller.wait(max(0.0, ends_at - time.monotonic()))


class _Caller:
    """Calls one tracker, in order, from a daemon thread."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_warned = False
        self._closing = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def call(self, step: int, function: Callable[[Tracker], None]) -> None:
        if self._closing:
            return
        if self._calls.qsize() >= _MAX_WAITING:
            self._warn(f"it is {_MAX_WAITING} steps behind; step {step} is left out")
            return
        self._calls.put(partial(function, self._tracker))

    def begin_close(self, *, failed: bool) -> None:
        if self._closing:
            return
        self._closing = True
        self._failed = failed
        self._calls.put(None)

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn("it did not end in time; what it has not taken is left out")

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:  # until `begin_close`, or the process's end
            self._try(call)
        self._try(partial(self._tracker.close, failed=self._failed))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a tracker's failure is not the run's
            self._warn(message_of(error))

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("tracker %s failed (further failures of it are not shown): %s", self._name, what)


def open_trackers(config: ExperimentConfig, run_dir: RunDir) -> Trackers:
    """Set up what `tracking` names."""
    trackers: list[tuple[str, Tracker]] = []
    for number, section in enumerate(config.tracking):
        try:
            trackers.append((section.type, open_tracker(section, config, run_dir)))
        except Exception as error:
            for _, tracker in trackers:
                with contextlib.suppress(Exception):  # the user has to know the other error
                    tracker.close(failed=True)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"tracking.{number}: {section.type} cannot be set up: {message_of(error)}") from error
    return Trackers(trackers)
