"""Runs that stand still, each for another reason, and one that is only slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import Run, make_run

pytestmark = pytest.mark.slow

TINY = (
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "training.max_steps=5000",
    "training.stall_timeout_s=6",
    "launch.stop_timeout_s=8",
    "optimizer.warmup_steps=0",
    "checkpoint.every_steps=1000",
    "evaluation=null",
)


def _run(folder: Path, *more: str, rewards: str | None = None) -> Run:
    run = make_run(folder, "quickstart.yaml", (*TINY, *more))
    if rewards is not None:
        run.config.write_text(run.config.read_text() + f"rewards:\n- function: {rewards}\n")
    return run


@pytest.mark.nightly
def test_a_reward_that_blocks_the_event_loop_ends_the_run_with_its_place(tmp_path: Path) -> None:
    run = _run(tmp_path, rewards="tests.e2e.hanging:blocks_the_event_loop")
    done = run.train(timeout_s=120.0)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "no step was finished and no token generated" in done.stdout
    assert "is waiting for the samples of step" in done.stdout
    assert "being scored" in done.stdout
    assert "is serving for" in done.stdout
    assert run.metrics(), "there was a run before it stood still"
    log = run.logs()
    assert "thread rollout:" in log
    assert "in blocks_the_event_loop" in log
    run.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_main_thread_that_hangs_has_its_process_ended(tmp_path: Path) -> None:
    loss = "{type: custom, function: 'tests.e2e.user_losses:blocks_the_main_thread', arguments: {first_call: 3}}"
    run = _run(tmp_path, f"loss={loss}", rewards="tests.e2e.soak_reward:by_place")
    done = run.train(timeout_s=120.0)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "no step was finished and no token generated" in done.stdout
    assert "and is training step 3" in done.stdout
    assert "did not end the process within launch.stop_timeout_s = 8 s" in done.stdout
    assert "in blocks_the_main_thread" in run.logs()
    assert len(run.metrics()) == 2
    run.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_run_that_is_only_slow_goes_on(tmp_path: Path) -> None:
    run = _run(
        tmp_path,
        "training.max_steps=4",
        "training.stall_timeout_s=12",
        "rollout.max_staleness=0",
        rewards="tests.e2e.hanging:is_slow_at_times",
    )
    summary, _ = run.complete(timeout_s=180.0)
    assert summary["steps"] == 4
    assert summary["wall_s"] > 24.0, "two stalls would have passed"


def test_a_run_that_can_still_save_does_so_before_it_ends(tmp_path: Path) -> None:
    """The rollouts wait for a reward that never comes, and the event loop is free."""
    run = _run(tmp_path, rewards="tests.e2e.hanging:never_answers")
    done = run.train(timeout_s=120.0)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "no step was finished and no token generated" in done.stdout
    steps = len(run.metrics())
    assert steps
    assert (run.folder / "checkpoints" / f"step_{steps}" / "state.json").exists()
    assert "did not end the process" not in done.stdout
    run.assert_nothing_is_left()
