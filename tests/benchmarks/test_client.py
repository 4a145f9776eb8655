"""The benchmarks of the client run and measure something; how fast it is they say themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import client_gil
from tests.benchmarks.support import run_apart

pytestmark = pytest.mark.clock


@pytest.mark.nightly
def test_rollouts_and_tokens_have_a_cost_and_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "client.json"
    sizes = ["--in-flight", "16", "--rollouts", "16", "--tokens", "8", "--seconds", "0.5", "--rounds", "1"]
    run_apart("client", [*sizes, "--rate", "100", "--json", str(file)])
    rows = {row["name"]: row["median"] for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 2 * 3
    assert all(value > 0.0 for value in rows.values())
    assert (
        rows["streaming, 16 in flight: rate"] < 16 * 100 * 1.5
    )  # tokens/s; what the server gives, and what began before
    for kind in ("at once", "streaming"):
        assert rows[f"{kind}, 16 in flight: thread"] <= rows[f"{kind}, 16 in flight: process"]


@pytest.mark.nightly
def test_the_training_thread_is_timed_with_rollouts_without_and_with_those_of_another_process(tmp_path: Path) -> None:
    file = tmp_path / "client_gil.json"
    sizes = ["--in-flight", "8", "--tokens", "8", "--rounds", "2", "--seconds", "0.05", "--width", "16"]
    run_apart("client_gil", [*sizes, "--rate", "100", "--rewards", "light", "--json", str(file)])
    found = json.loads(file.read_text())
    rows = {row["name"]: row["median"] for row in found["rows"]}
    for name in client_gil.VARIANTS:
        assert rows[f"light rewards, {name}: elapsed"] >= 0.9 * rows[f"light rewards, {name}: CPU"] > 0.0
    assert rows["light rewards, tokens/s while on"] > 0.0
    assert rows["light rewards, tokens/s while off"] < 0.2 * rows["light rewards, tokens/s while on"]
