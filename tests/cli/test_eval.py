"""`eval`: what it evaluates, what it refuses before anything starts, and the configuration that its servers get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.errors import ConfigError
from grpo_async.evaluation.target import EvaluationTarget, choose_target
from grpo_async.launcher import evaluate as evaluate_module
from grpo_async.launcher.evaluate import evaluate
from grpo_async.run_directory import RunDir
from tests.launcher.support import make_config


def _config(folder: Path, **sections: Any) -> ExperimentConfig:
    return make_config(folder, evaluation={"data": {"type": "jsonl", "path": "held.jsonl"}}, **sections)


def _checkpoints(run: RunDir, *steps: int) -> RunDir:
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
    return run


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_without_a_choice_it_is_the_model_of_the_configuration_or_what_running_servers_serve(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert choose_target(config, checkpoint=None, run=None) == EvaluationTarget(label="base", folder=config.model.path)
    served = _config(tmp_path, inference={"urls": ["http://127.0.0.1:1"]})
    assert choose_target(served, checkpoint=None, run=None) == EvaluationTarget(label="served")
    with pytest.raises(ConfigError, match="serve what they serve"):
        choose_target(served, checkpoint="latest", run=None)


def test_a_run_gives_the_model_that_it_exported_or_else_its_newest_checkpoint(tmp_path: Path) -> None:
    config, run = _config(tmp_path), RunDir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no such directory"):
        choose_target(config, checkpoint=None, run=run.root)
    _checkpoints(run, 5, 10)
    assert choose_target(config, checkpoint=None, run=run.root) == EvaluationTarget(label="step_10", run=run, step=10)
    model = _model(run.model)
    assert choose_target(config, checkpoint=None, run=run.root) == EvaluationTarget(label="model", folder=str(model))
    assert choose_target(config, checkpoint="latest", run=run.root).step == 10


def test_a_checkpoint_is_a_step_the_latest_the_best_or_a_folder(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run = RunDir(config.run_path)
    with pytest.raises(ConfigError, match="has no checkpoint"):
        choose_target(config, checkpoint="latest", run=None)
    _checkpoints(run, 5, 10)
    assert choose_target(config, checkpoint="5", run=None) == EvaluationTarget(label="step_5", run=run, step=5)
    with pytest.raises(ConfigError, match="there are latest, best, and the steps 5, 10"):
        choose_target(config, checkpoint="6", run=None)
    by_path = choose_target(config, checkpoint=str(run.checkpoint(10)), run=None)
    assert (by_path.label, by_path.step) == ("step_10", 10)
    folder = _model(tmp_path / "My model!")
    assert choose_target(config, checkpoint=str(folder), run=None) == EvaluationTarget(
        label="My-model-", folder=str(folder)
    )
    other = RunDir(tmp_path / "other")
    _checkpoints(other, 3)
    assert choose_target(config, checkpoint=str(other.checkpoint(3)), run=None).run == other
    run.config.write_text(dump_config(config))
    config = _config(tmp_path, checkpoint={"best_metric": "pass@1"})  # the run's own decides
    with pytest.raises(ConfigError, match="was evaluated by 'reward'"):
        choose_target(config, checkpoint="best", run=None)
    scores = ((5, 0.9), (10, 0.2))
    run.evaluation_log.write_text(
        "".join(json.dumps({"step": step, "metrics": {"reward": score}}) + "\n" for step, score in scores)
    )
    assert choose_target(config, checkpoint="best", run=None).step == 5
    with pytest.raises(ConfigError, match="neither a Hugging Face folder"):
        choose_target(config, checkpoint=str(tmp_path), run=None)


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "check_inputs", lambda *_, **__: [])
    with pytest.raises(ConfigError, match="evaluation: the configuration has no such section"):
        evaluate(make_config(tmp_path), checkpoint=None, run=None, out=None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ConfigError, match="is not an empty directory"):
        evaluate(_config(tmp_path), checkpoint=None, run=None, out=tmp_path / "full")
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2


def test_servers_get_the_model_and_nothing_of_how_it_is_trained(tmp_path: Path) -> None:
    """Adapters are merged by then; GPUs of the trainer go to the servers."""
    config = _config(
        tmp_path,
        model={"path": "base", "lora": {}},
        loss={"type": "dapo", "beta": 0.1},
        training={"max_steps": 7},
        launch={"num_trainer_ranks": 4, "stop_timeout_s": 9.0},
        inference={"engine": "embedded", "max_model_len": 64},
        rollout={"max_completion_tokens": 16},
    )
    served = evaluate_module._to_serve(config, "exported", RunDir(tmp_path / "runs" / "x"))
    assert (served.model.path, served.model.lora) == ("exported", None)
    assert (served.launch.num_trainer_ranks, served.launch.device, served.launch.stop_timeout_s) == (1, "cpu", 9.0)
    assert served.run_path == tmp_path / "runs" / "x"
    assert served.inference == config.inference
    assert served.rollout == config.rollout
    assert served.training.max_steps == 7
    assert served.evaluation == config.evaluation
