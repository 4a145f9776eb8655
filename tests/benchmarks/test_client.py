"""The benchmark of the client runs and measures something; how fast it is it says itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.support import run_apart

pytestmark = [pytest.mark.clock, pytest.mark.nightly]


def test_rollouts_and_tokens_have_a_cost_and_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "client.json"
    sizes = ["--in-flight", "16", "--rollouts", "16", "--tokens", "8", "--seconds", "0.5", "--rounds", "1"]
    run_apart("client", [*sizes, "--rate", "100", "--json", str(file)])
    rows = {row["name"]: row["median"] for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 2 * 3
    assert all(value > 0.0 for value in rows.values())
    assert rows["streaming, 16 in flight: rate"] < 16 * 100 * 1.5  # what the server gives, and what began before
    for kind in ("at once", "streaming"):
        assert rows[f"{kind}, 16 in flight: thread"] <= rows[f"{kind}, 16 in flight: process"]


def test_every_turn_of_a_conversation_has_a_cost(tmp_path: Path) -> None:
    file = tmp_path / "conversation.json"
    run_apart("client", ["--part", "conversation", "--turns", "8", "--conversations", "3", "--json", str(file)])
    found = json.loads(file.read_text())
    rows = {row["name"]: row["values"] for row in found["rows"]}
    assert set(rows) == {"turn 2", "turn 8", "turn 8 / turn 2"}
    assert all(len(values) == 3 and min(values) > 0.0 for values in rows.values())
    assert [target["at_most"] for target in found["targets"]] == [1.5]
