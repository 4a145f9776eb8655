"""The benchmark of the rollout table, with a store of some hundred rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rollouts
from tests.benchmarks.support import run_apart


@pytest.mark.nightly
def test_every_question_to_the_table_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    small = ["--rollouts", "400", "--tokens", "16", "--repeats", "1", "--folder", str(tmp_path / "store")]
    run_apart("rollouts", [*small, "--json", str(file)])
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    assert sum(name.startswith("filter ") and "first time" not in name for name in rows) == len(rollouts.FILTERS)
    for name in ("first table, new process, files cached", "histogram of reward", "refresh without news"):
        assert rows[name]["median"] > 0
    assert len(report["targets"]) == 2 + len(rollouts.FILTERS)
    assert report["notes"][0].startswith("2 blocks")
