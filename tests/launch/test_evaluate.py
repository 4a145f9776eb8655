"""`eval`: what it evaluates, what it refuses before anything starts, and the run that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.errors import CheckpointError, ConfigError
from grpo_async.evaluation.target import EvaluationTarget, choose_target
from grpo_async.launch import evaluate as evaluate_module
from grpo_async.launch.evaluate import run_evaluation
from grpo_async.launch.supervise import RunOutcome
from grpo_async.run_directory import RunDir
from grpo_async.utils.run_state import state_of
from tests.launch.support import make_config


def _config(folder: Path, **sections: Any) -> ExperimentConfig:
    return make_config(folder, evaluation={"data": {"type": "jsonl", "path": "held.jsonl"}}, **sections)


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_what_is_evaluated_is_named_by_the_run_a_checkpoint_or_else_the_configuration(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run, elsewhere = RunDir(config.run_path), RunDir(tmp_path / "elsewhere")

    def chosen(checkpoint: str | None = None) -> EvaluationTarget:
        return choose_target(config, checkpoint)

    assert chosen() == EvaluationTarget(label="base", folder=config.model.path)
    for each in (run, elsewhere):
        for step in (5, 10):
            each.checkpoint(step).mkdir(parents=True)
    model = str(_model(elsewhere.model))  # what a run has exported
    assert chosen(model) == EvaluationTarget(label="model", folder=model)
    assert chosen("latest").step == 10
    assert chosen("5") == EvaluationTarget(label="step_5", run=run, step=5)
    assert chosen(str(elsewhere.checkpoint(5))) == EvaluationTarget(label="step_5", run=elsewhere, step=5)
    for checkpoint in ("6", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"there are latest, best, and the steps 5, 10|neither a Hugging Face"):
            chosen(checkpoint)


def test_a_folder_of_others_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "check_inputs", lambda *_, **__: [])
    config, out = _config(tmp_path), tmp_path / "results"
    RunDir(config.run_path).checkpoint(5).mkdir(parents=True)  # without a manifest
    for is_there in (False, True):
        if is_there:
            out.mkdir()
        with pytest.raises(CheckpointError, match="step 5 cannot be used"):
            run_evaluation(config, checkpoint="5", out=out)
        assert out.exists() == is_there
    (out / "a").touch()
    with pytest.raises(ConfigError, match="is not an empty directory"):
        run_evaluation(config, checkpoint=None, out=out)
    assert [path.name for path in out.iterdir()] == ["a"]


def test_the_run_is_that_of_the_configuration_with_the_chosen_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are merged by then; several machines become one; no reference is loaded."""
    led: list[ExperimentConfig] = []

    def lead(config: ExperimentConfig, *_: Any, purpose: str, **__: Any) -> RunOutcome:
        led.append(config)
        found = {"before": {"reward": 0.5}, "during": [], "after": None, "group_by": None, "by_group": {"before": {}}}
        return RunOutcome(exit_code=0 if purpose == "evaluation" else 1, summary={"engine": "embedded", **found})

    monkeypatch.setattr(evaluate_module, "check_inputs", lambda *_, **__: [])
    monkeypatch.setattr(evaluate_module, "lead_run", lead)
    config = _config(
        tmp_path,
        model={"lora": {}},
        loss={"beta": 0.1, "reference": "another", "proximal": "recomputed", "correction": {"level": "token"}},
        rollout={"top_p": 0.9},
        launch={"ray": "auto", "trainer_nodes": 2, "num_trainer_ranks": 4},
    )
    exported = _model(tmp_path / "exported")
    outcome = run_evaluation(config, checkpoint=str(exported), out=tmp_path / "found")
    (given,) = led
    assert (given.model.path, given.model.lora) == (str(exported), None)
    assert (given.launch.ray, given.launch.trainer_nodes, given.launch.num_trainer_ranks) == (None, 1, 4)
    assert given.run_path == tmp_path / "found"
    assert not given.loss.needs_reference
    assert given.rollout == config.rollout
    assert given.evaluation is not None
    assert given.evaluation.at_start
    assert outcome.summary is not None
    assert outcome.summary["metrics"] == {"reward": 0.5}
    summary = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert state_of({}, summary).state == "evaluated"
