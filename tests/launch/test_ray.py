"""What can be tested of a run on Ray without a cluster; the rest is in tests/e2e/test_ray.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_async.run_directory import RunDir

ray = pytest.importorskip("grpo_async.launch.ray")


def test_what_the_node_with_rank_0_shows_is_repeated_by_the_command(tmp_path: Path) -> None:
    calls: list[Any] = []
    options = {"run_name": "x", "max_steps": 2, "run_dir": RunDir(tmp_path)}
    with ray.RemoteOutput(calls.append).display(**options) as display:
        display.show("phase", name="training")  # as the supervisor passes messages on
        display.note("look here")
    assert calls == [
        ("open", "", (), options),
        ("display", "show", ("phase",), {"name": "training"}),
        ("display", "show", ("note",), {"text": "look here"}),
    ]
    assert display.progress.content()["phase"] == "training"
