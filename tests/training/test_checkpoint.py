"""Checkpoints: what is loaded goes on as if nothing had happened, on another number of ranks too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.sections import CheckpointSection
from grpo_async.run_directory import RunDir
from grpo_async.training.checkpoint import prune, set_aside_later_checkpoints, steps_to_keep
from grpo_async.training.checkpoint_manifest import problem_of
from tests.support import ranks


def run_on_ranks(job: str, world_size: int, folder: Path, **arguments: Any) -> dict[str, Any]:
    return ranks.run_on_ranks(job, world_size, folder, module="tests.support.checkpoint_jobs", **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "more"),
    [
        (2, 2, {}),
        (2, 2, {"lora": {"rank": 4}}),
        (1, 2, {}),
        (2, 1, {"optimizer": "muon"}),
        (2, 1, {"optimizer": "adamw_8bit"}),
    ],
)
def test_a_loaded_run_goes_on_as_the_saved_one_did(
    tiny_model: Path, tmp_path: Path, saved_on: int, loaded_on: int, more: dict[str, Any]
) -> None:
    """What is saved is what was there when the write began: the run that saves trains on meanwhile. Adapters are saved without
    their base."""
    run = tmp_path / "run"
    settings = {"model": tiny_model, "run": run, **more}
    saved = run_on_ranks("save_after_one_step", saved_on, tmp_path / "save", **settings)
    loaded = run_on_ranks("load_and_go_on", loaded_on, tmp_path / "load", **settings)
    assert loaded["step"] == 1
    assert loaded["data"] == {"next": 5}
    assert loaded["lines"] == ["{}"]
    assert set(loaded["rates"]) == {0.25}, "settings are those of the resume"
    assert (saved["metrics"]["checkpoint/bytes"] > 500_000) == ("lora" not in more)
    assert problem_of(RunDir(run).checkpoint(1)) is None
    if saved_on == loaded_on:  # to the last bit
        assert (loaded["loss"], loaded["weights"]) == (saved["loss"], saved["weights"])
        return
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=1e-5)
    # one step more from the same weights and the same optimizer state
    assert loaded["weights"] == pytest.approx(saved["weights"], rel=1e-5, abs=1e-4)


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_the_last_checkpoint_untouched(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = run_on_ranks("save_on_a_full_disk", 2, tmp_path / "job", model=tiny_model, run=run)
    assert "cannot write checkpoint" in result["error"]
    assert "step_2" in result["error"]
    assert result["found"] == ["step_1"]


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_waits_for_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    result = run_on_ranks("save_slowly", 1, tmp_path / "job", model=tiny_model, run=tmp_path / "run")
    assert result["events"] == ["goes on from 1", "written 1", "goes on from 2", "written 2"]
    assert result["steps"] == [1, 2]
    assert result["loaded"] == result["saved"]  # the second, whose copies use the memory of those of the first


@pytest.mark.slow
def test_ranks_find_a_flipped_bit_and_go_on_from_the_checkpoint_before_it(tiny_model: Path, tmp_path: Path) -> None:
    found = run_on_ranks("find_undamaged_steps", 2, tmp_path / "job", model=tiny_model, run=tmp_path / "run")
    assert "__1_0.distcp is damaged: its checksum" in found["named"]
    assert (found["steps"], found["left"]) == ([1, 1], ["broken_step_2", "step_1"])
    assert found["notes"][-1].endswith("resuming from step 1")
    assert "__0_0.distcp is missing; there is no earlier one" in found["none"]


def test_checkpoints_after_the_resumed_step_are_set_aside_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    for step in (5, 10, 15):
        run_dir.checkpoint(step).mkdir(parents=True)
    seen: list[list[int]] = []

    def replace(old: Path, new: Path) -> None:
        old.rename(new)
        seen.append(run_dir.checkpoint_steps())

    monkeypatch.setattr("os.replace", replace)
    set_aside_later_checkpoints(run_dir, 5)
    assert seen == [[5, 10], [5]]  # newest first: after a kill 15, of another branch, is not the newest anymore
    assert len(list(run_dir.checkpoints.glob("replaced_step_*"))) == 2


def test_the_newest_every_nth_and_the_best_stay() -> None:
    scores = {5: 0.9, 10: 0.2, 15: 0.9, 20: math.nan, 99: 5.0}

    def kept(**section: int) -> set[int]:
        return steps_to_keep(
            [0, 5, 10, 15, 20, 25], CheckpointSection.model_validate({"keep_last": 1, **section}), scores
        )

    assert kept(keep_last=2) == {20, 25}
    assert kept(keep_every=10) == {10, 20, 25}
    assert kept(keep_best=1) == {15, 25}  # of equal ones the newer
    assert kept(keep_best=2) == {5, 15, 25}
    assert kept(keep_best=5) == {5, 10, 15, 25}


def test_pruning_leaves_alone_what_is_being_written_and_what_is_being_evaluated(tmp_path: Path) -> None:
    """The latter may be the best. Without `keep_best` nothing is kept for it."""
    run_dir = RunDir(tmp_path)
    for step in (5, 10, 15):
        run_dir.checkpoint(step).mkdir(parents=True)
    partial = run_dir.checkpoints / "writing_step_20"
    partial.mkdir()
    section = CheckpointSection(keep_last=1, keep_best=1)
    prune(run_dir, section, scores={10: 0.5}, evaluated_now=5)
    assert run_dir.checkpoint_steps() == [5, 10, 15]
    prune(run_dir, section, scores={5: 0.1, 10: 0.5})
    assert run_dir.checkpoint_steps() == [10, 15]
    prune(run_dir, CheckpointSection(keep_last=1), scores={10: 0.5}, evaluated_now=10)
    assert run_dir.checkpoint_steps() == [15]
    assert [path.name for path in run_dir.checkpoints.glob("writing_*")] == ["writing_step_20"]
