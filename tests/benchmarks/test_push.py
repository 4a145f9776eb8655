"""benchmarks/push.py on the embedded engine: every quantity is there, and those that belong together fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.push_parts.streams import Tokens, Window
from tests.benchmarks.support import run_apart


def test_a_push_is_measured_beside_its_broadcast_and_seen_by_streams(tmp_path: Path) -> None:
    file = tmp_path / "push.json"
    sizes = ["--engine", "embedded", "--megabytes", "4", "--rounds", "2", "--requests", "2", "--bucket-mb", "1"]
    code = run_apart("push", [*sizes, "--json", str(file)])
    found = json.loads(file.read_text())
    assert code == (0 if found["targets"][0]["met"] else 1)
    values = {(row["name"], row["unit"]): row["values"] for row in found["rows"]}
    for quantity in (("push", "ms"), ("bare broadcast", "ms"), ("load, by the server", "ms"), ("transfer", "MB/s")):
        assert len(values[quantity]) == 2
    for push, load, *phases in zip(
        values["push", "ms"], values["load, by the server", "ms"],
        *(values[f"  {phase}", "ms"] for phase in ("start", "transfer", "pause", "finish", "resume")),
        strict=True,
    ):  # fmt: skip
        assert load <= phases[3]  # finish
        assert sum(phases) == pytest.approx(push, rel=0.2)
    assert all(p < whole for p, whole in zip(values["  paused", "ms"], values["push", "ms"], strict=True))
    assert len(values["2 requests: longest gap - usual", "ms"]) == 4  # 2 pushes x 2 streams


def test_the_gap_of_a_push_is_the_longest_that_touches_it_and_the_usual_one_is_of_the_others() -> None:
    tokens = Tokens(num_streams=1, timeout_s=1.0)
    tokens.arrivals = [[0.0, 1.0, 2.0, 7.0, 8.0, 9.0, 12.0]]
    # the push from 2.5 to 4.0 falls into the gap of 5 s; 1, 1, 1, 1 and 3 s are left
    assert tokens.gaps([Window(2.5, 4.0)]) == (1.0, [5.0])
