"""Trackers, against the real libraries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.rundir import RunDir
from grpo_async.tracking import Trackers, open_trackers
from tests.e2e.support import wait_for


def _config(*tracking: dict[str, Any]) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "run": {"name": "tracked"},
            "model": {"path": "m"},
            "data": {"train": {"type": "jsonl", "path": "d"}},
            "rewards": [{"function": "a:b", "arguments": {"api_key": "sk-12345"}}],
            "tracking": list(tracking),
        }
    )


def test_tensorboard_gets_every_finite_value(tmp_path: Path) -> None:
    trackers = open_trackers(_config({"type": "tensorboard"}), RunDir(tmp_path))
    trackers.log(1, {"reward": 0.5, "policy_loss": float("nan")})
    trackers.log(2, {"reward": 0.75})
    trackers.close()
    (file,) = (tmp_path / "trackers" / "tensorboard").glob("events.out.tfevents.*")
    content = file.read_bytes()
    assert content.count(b"reward") == 2
    assert b"policy_loss" not in content


def test_weights_and_biases_writes_an_offline_run_below_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = open_trackers(_config({"type": "wandb", "project": "p", "mode": "offline"}), RunDir(tmp_path))
    trackers.log(1, {"reward": 0.5})
    trackers.close()
    (file,) = (tmp_path / "trackers").glob("wandb/offline-run-*/run-*.wandb")
    # its own process writes the file, some time after finish() has returned
    wait_for(lambda: b"reward" in file.read_bytes(), what="the metrics to be written", timeout_s=30.0)
    assert b"api_key" in file.read_bytes()
    assert b"sk-12345" not in file.read_bytes()


def test_a_failing_tracker_warns_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Recording:
        def __init__(self, error: Exception | None = None) -> None:
            self.steps: list[int] = []
            self._error = error

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if self._error is not None:
                raise self._error
            self.steps.append(step)

        def close(self) -> None: ...

    good = Recording()
    trackers = Trackers([("broken", Recording(OSError("no network"))), ("good", good)])
    trackers.log(1, {"reward": 0.5})
    trackers.log(2, {"reward": 0.5})
    assert good.steps == [1, 2]
    assert [record.message for record in caplog.records] == [
        "tracker broken failed (further failures of it are not shown): no network"
    ]


def test_a_missing_library_stops_the_run_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-async\[tensorboard\]'"):
        open_trackers(_config({"type": "tensorboard"}), RunDir(tmp_path))
