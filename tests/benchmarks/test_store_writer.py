"""The benchmark of the rollout store's writer, with tiny steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.support import run_apart


@pytest.mark.nightly
@pytest.mark.parametrize(("bound", "code"), [("1e9", 0), ("-101", 1)])
def test_steps_with_and_without_the_store_take_turns(tmp_path: Path, bound: str, code: int) -> None:
    file = tmp_path / "report.json"
    small = ["--rollouts", "2", "--tokens", "8", "--step-ms", "5", "--pairs", "2", "--max-percent", bound]
    assert run_apart("store_writer", [*small, "--json", str(file)]) == code
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["slow-down by the store"]["n"] == 2
    assert rows["append"]["median"] > 0
    assert rows["as lines"]["median"] > 1
