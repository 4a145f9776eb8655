"""The benchmark of token figures, small: three ways of a step, with the real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.token_figures import WAYS
from tests.benchmarks.support import run_apart


@pytest.mark.nightly
@pytest.mark.slow
def test_the_three_ways_of_a_step_are_compared(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ["--groups", "2", "--group-size", "2", "--prompt-tokens", "8", "--completion-tokens", "16", "--rounds", "2"]
    code = run_apart("token_figures", [*sizes, "--device", "cpu", "--json", str(report)])
    assert code in (0, 1)  # 1: figures are much of so small a step
    found = json.loads(report.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    for way in WAYS:
        assert rows[way]["n"] == 2
        assert rows[way]["lowest"] > 0.0
    assert rows["figures / nothing"]["n"] == rows["store / nothing"]["n"] == 2
    assert 0.0 < rows["calls of `figures` alone"]["lowest"] < 1000.0 * rows["figures"]["highest"]
    assert len(found["targets"]) == 2
