"""Runs that stand still, each for another reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import Run, make_run, rewards

pytestmark = pytest.mark.slow

STILL = "no step was finished and no token generated"


def _run(folder: Path, reward: str, *more: str) -> Run:
    tiny = (
        "rollout.groups_per_step=2",
        "rollout.group_size=4",
        "training.max_steps=5000",
        "training.stall_timeout_s=6",
        "launch.stop_timeout_s=8",
        "optimizer.warmup_steps=0",
        "checkpoint.every_steps=1000",
        "evaluation=null",
    )
    return make_run(folder, "quickstart.yaml", (*tiny, rewards(reward), *more))


@pytest.mark.nightly
def test_a_reward_that_blocks_the_event_loop_ends_the_run_with_its_place(tmp_path: Path) -> None:
    run = _run(tmp_path, "user_rewards:blocks_the_event_loop")
    printed = run.fail()
    for part in (STILL, "is waiting for the samples of step", "being scored", "has been serving for"):
        assert part in printed
    assert run.metrics(), "there was a run before it stood still"
    assert "in blocks_the_event_loop" in run.logs()


def test_a_run_that_can_still_save_does_so_before_it_ends(tmp_path: Path) -> None:
    """The rollouts wait for a reward that never comes, and the event loop is free."""
    run = _run(tmp_path, "user_rewards:never_answers")
    printed = run.fail()
    assert STILL in printed
    assert run.checkpoints() == [len(run.metrics())] != [0]
