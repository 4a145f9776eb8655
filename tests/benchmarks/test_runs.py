"""Every benchmark, small, in a process of its own: they set threads, processors and environment variables as they like. What it
measures is there, and what belongs together fits; how fast things are it says itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import ROOT

pytestmark = pytest.mark.nightly

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(name, arguments, codes): the report of `python -m benchmarks NAME ARGUMENTS`, with its exit code as `code`."""

    def run(name: str, arguments: str) -> dict[str, Any]:
        file = tmp_path / f"{name}.json"
        command = [sys.executable, "-m", "benchmarks", name, *arguments.split(), "--json", str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        print(done.stdout, done.stderr)
        found: dict[str, Any] = json.loads(file.read_text())
        assert found["command"] == ["python", *command[1:]]
        assert done.returncode == (0 if all(target["met"] for target in found["targets"]) else 1)
        return found

    return run


def _medians(report: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["median"] for row in report["rows"]}


def test_the_code_for_gpus_runs_on_a_cpu(run: Run) -> None:
    report = run("gpu", "--device cpu --rounds 1 --in-flight 2 --completion-tokens 4")
    assert _medians(report)["2 in flight"] > 0
    assert any("says nothing of a GPU" in note for note in report["notes"])


def test_a_push_is_measured_beside_its_broadcast(run: Run) -> None:
    report = run("push", "--engine embedded --shape small --rounds 2 --bucket-mb 1")
    values = {(row["name"], row["unit"]): row["values"] for row in report["rows"]}
    for quantity in (("push", "ms"), ("bare broadcast", "ms"), ("load, by the server", "ms"), ("transfer", "MB/s")):
        assert len(values[quantity]) == 2
    for whole_push, load, *phases in zip(
        values["push", "ms"], values["load, by the server", "ms"],
        *(values[f"  {phase}", "ms"] for phase in ("start", "transfer", "pause", "finish", "resume")),
        strict=True,
    ):  # fmt: skip
        assert load <= whole_push  # in part while the next bucket travels
        assert sum(phases) == pytest.approx(whole_push, rel=0.2)
    assert all(p <= whole for p, whole in zip(values["  stopped", "ms"], values["push", "ms"], strict=True))
