"""The stopwatch of a thread."""

from __future__ import annotations

import pytest

from grpo_async.training.timing import Activity


def test_what_is_done_inside_something_else_is_not_counted_there_and_an_error_is_counted_too() -> None:
    """5 s of waiting with a push of 2 s in the middle that fails, then 1 s of nothing, then 4 s of training."""
    clock = [100.0]
    activity = Activity(clock=lambda: clock[0])
    activity.begin("in step 2")

    def push() -> None:
        with activity.during("pushing version 1", "push", "pushing"):
            clock[0] = 104.0
            assert str(activity) == "pushing version 1, for 2 s"
            raise RuntimeError("lost")

    with activity.during("waiting for the samples of step 2", "wait", "waiting"):
        clock[0] = 102.0
        with pytest.raises(RuntimeError, match="lost"):
            push()
        clock[0] = 105.0
        assert str(activity) == "waiting for the samples of step 2, for 5 s"
    clock[0] = 106.0
    with activity.during("training step 2", "train", "training"):
        clock[0] = 110.0
    assert str(activity) == "in step 2, for 10 s"
    assert activity.num_begun == 3, "a push to a server that came back is no progress"
    assert activity.take_seconds() == {"waiting": 3.0, "pushing": 2.0, "training": 4.0}
    assert activity.take_seconds() == {}
