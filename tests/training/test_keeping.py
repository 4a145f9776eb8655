"""Which checkpoints stay."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from grpo_async.config.sections import CheckpointSection
from grpo_async.errors import CheckpointError
from grpo_async.rundir import RunDir
from grpo_async.training.checkpoint import CheckpointKeeper, steps_to_keep


def _run(folder: Path, *steps: int) -> RunDir:
    rundir = RunDir(folder)
    for step in steps:
        rundir.checkpoint(step).mkdir(parents=True)
    return rundir


def test_the_newest_every_nth_and_the_best_stay() -> None:
    steps = [0, 5, 10, 15, 20, 25]
    assert steps_to_keep(steps, keep_last=2) == {20, 25}
    assert steps_to_keep(steps, keep_last=1, keep_every=10) == {10, 20, 25}
    scores = {5: 0.9, 10: 0.2, 15: 0.9, 20: math.nan, 99: 5.0}
    assert steps_to_keep(steps, keep_last=1, keep_best=1, scores=scores) == {15, 25}  # of equal ones the newer
    assert steps_to_keep(steps, keep_last=1, keep_best=2, scores=scores) == {5, 15, 25}
    assert steps_to_keep(steps, keep_last=1, keep_best=5, scores=scores) == {5, 10, 15, 25}


def test_pruning_goes_by_the_metric_that_is_asked_for(tmp_path: Path) -> None:
    rundir = _run(tmp_path, 5, 10, 15)
    keeper = CheckpointKeeper(rundir, CheckpointSection(keep_last=1, keep_best=1, best_metric="pass@1"))
    keeper.note_evaluation(5, {"pass@1": 0.5, "reward": 0.1})
    keeper.note_evaluation(10, {"pass@1": 0.4, "reward": 0.9})
    keeper.prune()
    assert rundir.checkpoint_steps() == [5, 15]
    assert not list(rundir.checkpoints.glob("writing_*"))


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    rundir = _run(tmp_path, 5, 10)
    partial = rundir.checkpoints / "writing_step_15"
    partial.mkdir()
    CheckpointKeeper(rundir, CheckpointSection(keep_last=1)).prune()
    assert rundir.checkpoint_steps() == [10]
    assert partial.is_dir()


def test_a_resume_knows_the_evaluations_up_to_its_step(tmp_path: Path) -> None:
    rundir = _run(tmp_path, 5, 10)
    section = CheckpointSection(keep_last=1, keep_best=1)
    keeper = CheckpointKeeper(rundir, section)
    for step in (5, 10, 15):
        keeper.note_evaluation(step, {"reward": 1.0 / step})
    resumed = CheckpointKeeper(rundir, section, resumed_step=10)
    assert sorted(resumed.evaluations) == [5, 10]
    resumed.note_evaluation(20, {"reward": 0.0})
    assert sorted(json.loads((rundir.checkpoints / "evaluations.json").read_text())) == ["10", "20", "5"]


def test_a_damaged_file_of_evaluations_names_itself(tmp_path: Path) -> None:
    rundir = _run(tmp_path, 5)
    (rundir.checkpoints / "evaluations.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"evaluations\.json"):
        CheckpointKeeper(rundir, CheckpointSection())


def test_a_checkpoint_that_is_being_evaluated_stays_until_the_result_is_known(tmp_path: Path) -> None:
    """It may be the best. Without `keep_best` nothing is kept for it."""
    rundir = _run(tmp_path, 5, 10, 15)
    keeper = CheckpointKeeper(rundir, CheckpointSection(keep_last=1, keep_best=1))
    keeper.expect_evaluation(5)
    keeper.prune()
    assert rundir.checkpoint_steps() == [5, 15]
    keeper.note_evaluation(5, {"reward": 0.1})
    keeper.note_evaluation(15, {"reward": 0.2})
    keeper.expect_evaluation(None)
    keeper.prune()
    assert rundir.checkpoint_steps() == [15]
    plain = CheckpointKeeper(_run(tmp_path, 20), CheckpointSection(keep_last=1))
    plain.expect_evaluation(15)
    plain.prune()
    assert rundir.checkpoint_steps() == [20]
