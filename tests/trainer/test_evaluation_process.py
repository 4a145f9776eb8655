"""The servers of `grpo-async eval`, as its process takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_async.inference.api import ServerInfo
from grpo_async.inference.fleet import Fleet
from grpo_async.trainer.evaluation_process import _serve_what_is_loaded
from tests.launcher.support import make_config


class _Control:
    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def send(self, kind: str, *, index: int) -> None:
        self.sent.append((kind, index))


def test_the_launcher_hears_of_each_server_once_per_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whose dtype is not that of the configuration: no weights are sent, so there is nothing to warn about."""
    config = make_config(tmp_path)
    fleet = Fleet(["http://127.0.0.1:1", "http://127.0.0.1:2"], config.inference, token=None, control_timeout_s=1.0)
    control: Any = _Control()
    _serve_what_is_loaded(config, fleet, control)

    def is_up(index: int, life: str) -> None:
        info = ServerInfo(
            engine="embedded", instance_id=life, model="m", dtype="bfloat16",
            max_model_len=config.inference.max_model_len, policy_version=0,
        )  # fmt: skip
        fleet.found(fleet.server(index), info)

    try:
        is_up(0, "a")
        is_up(1, "b")
        fleet.fence(fleet.server(1), "it is gone")
        is_up(1, "c")
    finally:
        fleet.close()
    assert control.sent == [("server_serving", 0), ("server_serving", 1), ("server_serving", 1)]
    assert len(fleet.serving()) == 2
    assert "weights are sent" not in caplog.text
