"""Trackers, against the real libraries."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.tracking import Trackers, open_trackers
from grpo_async.tracking.backends import Tracker
from tests.support.configs import small_config
from tests.support.waiting import eventually

ROWS: list[dict[str, str | float | None]] = [
    {"step": 4, "prompt": "3 + 4 =", "completion": "it is\n7 | seven", "reward": 1.0, "rewards/exact": 1.0},
    {"step": 4, "prompt": "1 + 1 =", "completion": "eleven", "reward": None},
]
DATA = [list(ROWS[0].values()), [*ROWS[1].values(), None]]


class _Recording(Tracker):
    """A tracker that fails, or waits until it is released."""

    shown_by = "nobody"

    def __init__(self, *, error: Exception | None = None, released: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.closed = threading.Event()
        self._error, self._released = error, released

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._released is not None:
            self._released.wait(30.0)
        if self._error is not None:
            raise self._error
        self.steps.append(step)

    def close(self, *, failed: bool) -> None:
        self.closed.set()


def _config(*tracking: dict[str, Any]) -> ExperimentConfig:
    return small_config(
        run={"name": "tracked"},
        rewards=[{"function": "a:b", "arguments": {"api_key": "sk-12345"}}],
        tracking=list(tracking),
    )


def test_weights_and_biases_writes_an_offline_run_below_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = open_trackers(_config({"type": "wandb", "project": "p", "mode": "offline"}), RunDir(tmp_path))
    trackers.log(1, {"reward": 0.5})
    trackers.log_completions(1, ROWS)
    trackers.close()
    (file,) = (tmp_path / "trackers").glob("wandb/offline-run-*/run-*.wandb")
    assert trackers.shown_by == [f"wandb: wandb sync {file.parent}"]
    # its own process writes the file, some time after finish() has returned
    assert eventually(lambda: b"held_out/completions" in file.read_bytes(), 30.0), "the table to be written"
    (table,) = file.parent.glob("files/media/table/held_out/completions_*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == list(ROWS[0])
    assert content["data"] == DATA
    assert b"api_key" in file.read_bytes()
    assert b"sk-12345" not in file.read_bytes()


def test_a_failing_tracker_warns_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good = _Recording()
    trackers = Trackers([("broken", _Recording(error=OSError("no network"))), ("good", good)])
    trackers.log(1, {"reward": 0.5})
    trackers.log(2, {"reward": 0.5})
    trackers.close()
    assert good.steps == [1, 2]
    assert [record.message for record in caplog.records] == [
        "tracker broken failed (further failures of it are not shown): OSError: no network"
    ]


def test_a_tracker_that_cannot_be_set_up_stops_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no login")

    monkeypatch.setattr("wandb.init", refuse)
    monkeypatch.setattr("grpo_async.tracking.backends.Tensorboard.close", refuse)  # that of the one before
    with pytest.raises(ConfigError, match=r"tracking.1: wandb cannot be set up: OSError: no login"):
        open_trackers(_config({"type": "tensorboard"}, {"type": "wandb", "project": "p"}), RunDir(tmp_path))


def test_a_hanging_tracker_keeps_nobody_waiting_and_is_ended_when_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    slow = _Recording(released=(released := threading.Event()))
    trackers = Trackers([("slow", slow)], close_s=0.2)
    started = time.monotonic()
    for step in range(1500):
        trackers.log(step, {"reward": 0.5})
    trackers.close()
    assert time.monotonic() - started < 5.0
    released.set()
    assert slow.closed.wait(30.0)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    # the thread may have taken the first step before the queue was full
    assert re.search(r"failures of it are not shown\): it is 1000 steps behind; step 100[01] is left out$", warning)
