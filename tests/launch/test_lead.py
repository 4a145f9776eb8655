"""The order of rank 0's life, and what it asks of a server; everything around the order is a fake that notes its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError, DeadlineError
from grpo_async.inference.control import ServerControl
from grpo_async.inference.surface import ServerInfo
from grpo_async.launch import lead as lead_module
from grpo_async.launch.assignment import Assignment
from grpo_async.launch.control import ControlClient
from grpo_async.launch.lead import lead
from grpo_async.rundir import RunDir
from grpo_async.training import loop as loop_module
from grpo_async.training.checkpoint import TrainerState
from tests.launch.support import make_config
from tests.support.local_server import LocalServer, Refusal, local_server


def _info(**changes: Any) -> ServerInfo:
    fields = {
        "engine": "embedded",
        "engine_version": "1",
        "model": "m",
        "dtype": "float32",
        "max_model_len": 2048,
        "policy_version": 0,
    }
    return ServerInfo(**{**fields, **changes})  # fmt: skip


class _World:
    """Everything that rank 0 talks to. `events`: what it did, in order; `closed`: what it closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, info: ServerInfo) -> None:
        self.events: list[str] = []
        self.closed: list[str] = []
        self._info = info
        for module, name, fake in (
            (lead_module, "ServerControl", lambda url, **_: nullcontext(self)),
            (lead_module, "build_rollout_side", lambda config, **_: self._side()),
            (lead_module, "GlooTransport", lambda control, **_: self._transport()),
            (lead_module, "load_state", lambda rundir, step: self._state(step)),
            (lead_module, "load_tensors", lambda rundir, step, *_: self.events.append(f"restore {step}")),
            (lead_module, "set_aside_later_checkpoints", lambda rundir, step: None),
            (lead_module, "push_weights", self._push_weights),
            (loop_module, "save_checkpoint", lambda rundir, step, *_: self.events.append(f"save {step}")),
            (loop_module, "prune_checkpoints", lambda rundir, **_: None),
        ):
            monkeypatch.setattr(module, name, fake)

    def _side(self) -> SimpleNamespace:
        return SimpleNamespace(source=self, evaluator=self, majority_baseline=None)

    def _transport(self) -> SimpleNamespace:
        return SimpleNamespace(connect=lambda: None, close=lambda: self.closed.append("weight group"))

    def _state(self, step: int) -> TrainerState:
        return TrainerState(step=step, data={}, outstanding_prompts=[], ledger={}, progress={})

    def _push_weights(self, parameters: Any, *, version: int, **_: Any) -> SimpleNamespace:
        self.events.append(f"push {version}")
        return SimpleNamespace(metrics=dict)

    # the server's control
    def wait_until_ready(self, *, deadline_s: float, setting: str, stop: Any) -> ServerInfo:
        return self._info

    def info(self) -> ServerInfo:
        return self._info

    # the rollout source
    def evaluate(self, evaluator: Any, *, version: int, heartbeat: Any) -> dict[str, float]:
        self.events.append(f"evaluate {version}")
        return {"reward": 0.5}

    def start(self) -> None:
        self.events.append("start generating")

    def take(self, num_groups: int, *, trainer_version: int, heartbeat: Callable[[], None]) -> Sequence[Any] | None:
        self.events.append(f"take {trainer_version}")
        return None  # the run is to stop

    def advance(self, version: int) -> None:
        self.events.append(f"serve {version}")

    def resume_state(self) -> tuple[dict[str, Any], list[int], dict[str, Any]]:
        return {}, [], {}

    def ledger_snapshot(self) -> dict[str, Any]:
        return {}

    def interrupt(self) -> None: ...

    def stop_generating(self) -> None: ...

    def close(self) -> None:
        self.closed.append("rollout side")


def _lead(config: ExperimentConfig, *, resume_step: int | None = None, url: str = "http://server") -> None:
    rundir = RunDir(config.run_path)
    rundir.create()
    place = Assignment(
        rundir=rundir, attempt_dir=rundir.latest_logs, server_url=url, rank=0, local_rank=0, world_size=1,
        store_file=None, resume_step=resume_step,
    )  # fmt: skip
    workplace: Any = SimpleNamespace(
        config=config, rundir=rundir, policy=None, optimizer=None, parameters=None, num_ranks=1,
        channel=SimpleNamespace(send=lambda commands: None),
    )  # fmt: skip
    renderer: Any = None
    lead(place, config, ControlClient(None), workplace, renderer)


def test_generation_starts_after_the_checkpoint_was_restored_and_its_weights_were_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1.7, R5.2: restore, push, and only then the first rollout, whatever makes it."""
    world = _World(monkeypatch, _info())
    _lead(make_config(tmp_path, training={"max_steps": 9}), resume_step=3)
    assert world.events == ["restore 3", "push 3", "serve 3", "evaluate 3", "start generating", "take 3"]


def test_a_new_run_pushes_its_weights_before_it_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1.7."""
    world = _World(monkeypatch, _info())
    _lead(make_config(tmp_path))
    assert world.events == ["push 0", "serve 0", "evaluate 0", "start generating", "take 0", "save 0"]
    assert sorted(world.closed) == ["rollout side", "weight group"]


def test_a_push_that_fails_generates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1.7, R1.8: and the weight group and the rollout thread are ended, as at the end of every run."""
    world = _World(monkeypatch, _info())

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no way to the server")

    monkeypatch.setattr(lead_module, "push_weights", fails)
    with pytest.raises(OSError, match="no way to the server"):
        _lead(make_config(tmp_path))
    assert world.events == []
    assert sorted(world.closed) == ["rollout side", "weight group"]


def test_a_server_of_another_dtype_is_warned_about_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R1.15: the server serves bfloat16, the configuration says float32; with bfloat16 on both sides there is no word."""
    config = make_config(tmp_path)
    assert config.inference.dtype == "float32"
    _World(monkeypatch, _info(dtype="bfloat16"))
    with caplog.at_level(logging.WARNING):
        _lead(config)
    (warning,) = caplog.records
    assert "the server serves bfloat16, inference.dtype says float32" in warning.getMessage()
    caplog.clear()
    (tmp_path / "same").mkdir()
    with caplog.at_level(logging.WARNING):
        _lead(make_config(tmp_path / "same", inference={"dtype": "bfloat16"}))
    assert caplog.records == []


def test_a_server_that_takes_shorter_sequences_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch, _info(max_model_len=100))
    with pytest.raises(ConfigError, match=r"takes 100 tokens, inference\.max_model_len is 2048"):
        _lead(make_config(tmp_path))
    assert world.events == []


def test_the_start_up_time_out_is_a_setting_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1.4: /health answers 503 for ever; the request time-out and the queue wait are much longer."""

    async def not_ready(request: Any) -> Any:
        raise Refusal(503)
        yield b""

    _World(monkeypatch, _info())
    monkeypatch.setattr(lead_module, "ServerControl", ServerControl)
    config = make_config(
        tmp_path,
        inference={"startup_timeout_s": 0.4, "request_timeout_s": 500.0},
        training={"queue_timeout_s": 500.0, "max_steps": 1},
    )
    server: LocalServer
    with local_server(not_ready) as server, pytest.raises(DeadlineError, match=r"raise `inference\.startup_timeout_s`"):
        _lead(config, url=server.url)
    assert len(server.requests) > 1
