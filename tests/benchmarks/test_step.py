"""The step's benchmark, small: both sides compute the same, and what is counted is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.support import run_apart

TINY = [
    "--samples", "32", "--prompt-tokens", "8", "--completion-tokens", "32", "--micro-batch-tokens", "128", "--vocab", "256",
    "--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--chunk", "16",
    "--rounds", "2", "--split-rounds", "1", "--device", "cpu",
]  # fmt: skip


@pytest.mark.slow
def test_the_step_and_the_padded_loops_compute_the_same_and_are_compared(tmp_path: Path) -> None:
    """Exit code 1 may only come from the speed, which two rounds of a tiny step do not tell; what differs raises SystemExit."""
    report = tmp_path / "report.json"
    assert run_apart("step", [*TINY, "--minibatches", "2", "--json", str(report)]) in (0, 1)
    found = json.loads(report.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    for side in ("packed", "padded", "sorted"):
        assert rows[f"{side}: trained tokens/s"]["lowest"] > 0.0
        assert 0.0 < rows[f"{side}: real / computed tokens"]["median"] <= 1.0
    assert rows["packed: real / computed tokens"]["median"] > rows["padded: real / computed tokens"]["median"]
    assert rows["packed over padded"]["n"] == 2
    parts = {name: row["median"] for name, row in rows.items() if name.startswith("packed, part: ")}
    assert sum(parts.values()) == pytest.approx(100.0)
    # every part was met: a function that is named differently now would leave its time in another's
    assert len(parts) == 15
    assert min(parts.values()) > 0.0
    assert rows["packed: host syncs of an update"]["median"] == 1.0
    assert [target["met"] for target in found["targets"][:2]] == [True, True]
