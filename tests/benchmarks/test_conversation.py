"""The benchmark of long conversations runs and measures something; how fast it is it says itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.support import run_apart


@pytest.mark.nightly
def test_every_turn_has_a_cost(tmp_path: Path) -> None:
    file = tmp_path / "conversation.json"
    run_apart("conversation", ["--turns", "8", "--conversations", "3", "--json", str(file)])
    found = json.loads(file.read_text())
    rows = {row["name"]: row["values"] for row in found["rows"]}
    assert set(rows) == {"turn 2", "turn 8", "turn 8 / turn 2"}
    assert all(len(values) == 3 and min(values) > 0.0 for values in rows.values())
    assert [target["at_most"] for target in found["targets"]] == [1.5]
