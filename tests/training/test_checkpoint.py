"""Checkpoints: what is loaded goes on as if nothing had happened, on another number of ranks too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_async.errors import CheckpointError
from grpo_async.rundir import RunDir
from grpo_async.training.checkpoint import load_state, prune_checkpoints, set_aside_later_checkpoints
from tests.support.ranks import run_on_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 1), (2, 1)])
def test_a_loaded_run_goes_on_as_the_saved_one_did(
    tiny_model: Path, tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    run = tmp_path / "run"
    saved = run_on_ranks("save_after_one_step", saved_on, tmp_path / "save", model=tiny_model, run=run)
    loaded = run_on_ranks("load_and_go_on", loaded_on, tmp_path / "load", model=tiny_model, run=run)
    assert loaded["step"] == 1
    assert loaded["data"] == {"next": 5}
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=1e-5)
    # one step more from the same weights and the same optimizer state
    assert loaded["weights"] == pytest.approx(saved["weights"], rel=1e-5, abs=1e-4)


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_the_last_checkpoint_untouched(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    error = run_on_ranks("save_on_a_full_disk", 1, tmp_path / "job", model=tiny_model, run=run)["error"]
    assert error is not None
    assert "cannot write checkpoint" in error
    assert "free space" in error
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_1"]


@pytest.mark.slow
def test_the_exported_model_is_the_trained_one(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    trained = run_on_ranks("export", 2, tmp_path / "job", model=tiny_model, target=folder)["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().double().reshape(-1)
        value = float((flat * torch.linspace(1.0, 2.0, flat.numel())).sum())
        assert value == pytest.approx(trained[name], abs=1e-6), name
    assert not list(tmp_path.glob("writing_*"))


def test_a_broken_state_file_names_itself(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.checkpoint(3).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_state(rundir, 3)
    (rundir.checkpoint(3) / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="another format"):
        load_state(rundir, 3)


def test_pruning_keeps_the_newest_and_removes_what_a_crash_left(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    for name in ("step_5", "step_10", "step_15", "writing_step_20"):
        (rundir.checkpoints / name).mkdir(parents=True)
    assert rundir.checkpoint_steps() == [5, 10, 15]  # the half-written one is not a checkpoint
    prune_checkpoints(rundir, keep_last=2)
    assert sorted(path.name for path in rundir.checkpoints.iterdir()) == ["step_10", "step_15"]


def test_checkpoints_after_the_resumed_step_are_set_aside_not_taken_for_its_own(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    for step in (5, 10, 15):
        rundir.checkpoint(step).mkdir(parents=True)
    set_aside_later_checkpoints(rundir, 5)
    assert rundir.checkpoint_steps() == [5]
    assert sorted(path.name for path in rundir.checkpoints.glob("replaced_*")) == [
        "replaced_step_10",
        "replaced_step_15",
    ]
