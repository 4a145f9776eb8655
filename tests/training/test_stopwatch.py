"""Seconds by what they went into, each counted once."""

from __future__ import annotations

import pytest

from grpo_async.training.timing import Stopwatch


def _watch() -> tuple[Stopwatch, list[float]]:
    """A stopwatch and its clock, which the tests set."""
    clock = [100.0]
    return Stopwatch(lambda: clock[0]), clock


def test_what_is_done_inside_something_else_is_not_counted_there() -> None:
    """5 s of waiting with a push of 2 s in the middle, then 1 s of nothing, then 4 s of training."""
    watch, clock = _watch()
    with watch.during("waiting"):
        clock[0] = 102.0
        with watch.during("pushing"):
            clock[0] = 104.0
        clock[0] = 105.0
    clock[0] = 106.0
    with watch.during("training"):
        clock[0] = 110.0
    assert watch.take() == {"waiting": 3.0, "pushing": 2.0, "training": 4.0}
    assert watch.take() == {}


def test_the_same_twice_adds_up_and_seconds_before_the_last_take_are_gone() -> None:
    watch, clock = _watch()
    with watch.during("pushing"):
        clock[0] = 101.0
    watch.take()
    for _ in range(2):
        with watch.during("pushing"):
            clock[0] += 3.0
    assert watch.take() == {"pushing": 6.0}


def test_what_is_running_while_they_are_taken_is_counted_on_both_sides() -> None:
    watch, clock = _watch()
    with watch.during("training"):
        clock[0] = 101.0
        first = watch.take()
        clock[0] = 105.0
    assert (first, watch.take()) == ({"training": 1.0}, {"training": 4.0})


def test_what_ends_with_an_error_is_counted_too() -> None:
    watch, clock = _watch()

    def fails() -> None:
        with watch.during("pushing"):
            clock[0] = 101.0
            raise RuntimeError("lost")

    with watch.during("waiting"):
        with pytest.raises(RuntimeError, match="lost"):
            fails()
        clock[0] = 103.0
    assert watch.take() == {"pushing": 1.0, "waiting": 2.0}
