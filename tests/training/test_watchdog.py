"""When a run counts as standing still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from grpo_async.training.watchdog import Activity, StallWatchdog

TIMEOUT_S = 0.5
SEVERAL_TIMEOUTS_S = 2.0


class _Watched:
    """A watchdog on a counter that the test moves."""

    def __init__(self, progress: Callable[[], object], *, excused: bool = False) -> None:
        self.excused = excused
        self.stalls: list[float] = []
        self.stalled = threading.Event()
        self.watchdog = StallWatchdog(
            timeout_s=TIMEOUT_S, progress=progress, is_excused=lambda: self.excused, on_stall=self._note
        )
        self.watchdog.start()

    def _note(self, stalled_s: float) -> None:
        self.stalls.append(stalled_s)
        self.stalled.set()


def test_a_run_that_stands_still_is_noticed_once_after_the_timeout() -> None:
    began = time.monotonic()
    watched = _Watched(lambda: 1)
    assert watched.stalled.wait(timeout=10.0)
    assert time.monotonic() - began >= TIMEOUT_S
    assert watched.stalls[0] >= TIMEOUT_S
    assert not threading.Event().wait(timeout=SEVERAL_TIMEOUTS_S)
    assert len(watched.stalls) == 1


def test_a_slow_run_that_moves_is_left_alone() -> None:
    """It moves in the last third of each timeout."""
    began = time.monotonic()
    watched = _Watched(lambda: int((time.monotonic() - began) / (TIMEOUT_S * 0.7)))
    assert not watched.stalled.wait(timeout=SEVERAL_TIMEOUTS_S)
    watched.watchdog.stop()


def test_nothing_is_noticed_while_there_is_an_excuse_and_the_clock_starts_after_it() -> None:
    watched = _Watched(lambda: 1, excused=True)
    assert not watched.stalled.wait(timeout=SEVERAL_TIMEOUTS_S)
    ended = time.monotonic()
    watched.excused = False
    assert watched.stalled.wait(timeout=10.0)
    assert time.monotonic() - ended >= TIMEOUT_S - TIMEOUT_S / 5  # it looks ten times in a timeout
    assert watched.stalls[0] < 5 * TIMEOUT_S


def test_counters_that_cannot_be_read_count_as_standing_still() -> None:
    def broken() -> object:
        raise OSError("no connection")

    assert _Watched(broken).stalled.wait(timeout=10.0)


def test_one_that_was_stopped_is_silent() -> None:
    watched = _Watched(lambda: 1)
    watched.watchdog.stop()
    assert not watched.stalled.wait(timeout=SEVERAL_TIMEOUTS_S)


def test_an_activity_in_between_is_followed_by_the_one_before() -> None:
    activity = Activity()
    activity.begin("waiting for the samples of step 2")
    with activity.during("pushing version 1"):
        assert str(activity) == "pushing version 1, for 0 s"
    assert str(activity) == "waiting for the samples of step 2, for 0 s"
    assert activity.num_begun == 1
