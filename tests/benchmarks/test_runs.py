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


@pytest.mark.clock
def test_rollouts_and_turns_of_a_conversation_have_a_cost(run: Run) -> None:
    found = _medians(run("client", "--in-flight 16 --tokens 8 --seconds 0.5 --rounds 1 --rate 100"))
    assert len(found) == 3
    assert all(value > 0.0 for value in found.values())
    assert found["16 in flight: rate"] < 16 * 100 * 1.5  # what the server gives, and what began before
    assert found["16 in flight: thread"] <= found["16 in flight: process"]
    report = run("client", "--part conversation --turns 8 --conversations 3")
    rows = {row["name"]: row["values"] for row in report["rows"]}
    assert set(rows) == {"turn 2", "turn 8", "turn 8 / turn 2"}
    assert all(len(values) == 3 and min(values) > 0.0 for values in rows.values())
    assert [target["at_most"] for target in report["targets"]] == [1.5]


def test_the_code_for_gpus_runs_on_a_cpu(run: Run) -> None:
    report = run("gpu", "--device cpu --rounds 1 --in-flight 2 --completion-tokens 4")
    assert _medians(report)["2 in flight"] > 0
    assert any("says nothing of a GPU" in note for note in report["notes"])


@pytest.mark.slow
def test_chunks_and_full_logits_compute_the_same_and_are_compared(run: Run) -> None:
    """512 x 30000 x 4 bytes = 61 MB, of which full logits hold at least two at a time; chunks of 16 hold 2 MB, and the process's
    first call some 80 more, whatever the size."""
    report = run("logprobs", "--tokens 512 --vocab 30000 --hidden 32 --chunk 16 --rounds 2 --device cpu")
    found = _medians(report)
    assert next(row["n"] for row in report["rows"] if row["name"] == "chunked / full: time") == 2
    assert found["difference of loss and gradient"] < 1e-3
    assert found["full: memory beyond gradients"] > 120.0
    assert found["chunked / full: memory beyond gradients"] < 0.8


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
        assert load <= phases[3]  # finish
        assert sum(phases) == pytest.approx(whole_push, rel=0.2)
    assert all(p <= whole for p, whole in zip(values["  stopped", "ms"], values["push", "ms"], strict=True))


@pytest.mark.slow
def test_the_step_with_and_without_sharing_and_padded_computes_the_same_and_is_compared(run: Run) -> None:
    """What differs raises SystemExit."""
    sizes = (
        "--samples 32 --group-size 8 --prompt-tokens 8 --completion-tokens 32 --micro-batch-tokens 128 --shape tiny --chunk 16 "
        "--rounds 2 --device cpu"
    )
    found = _medians(run("step", sizes))
    efficiencies = []
    for side in ("packed", "unshared", "padded"):
        assert found[f"{side}: trained tokens/s"] > 0.0
        efficiencies.append(found[f"{side}: needed / computed tokens"])
    assert efficiencies[0] > efficiencies[1] == 1.0 > efficiencies[2] > 0.0


def test_plan_split_send_and_pack_add_up_to_the_time_before_the_first_forward(run: Run) -> None:
    sizes = "--ranks 2 --samples 16 --prompt-tokens 8 --completion-tokens 64 --micro-batch-tokens 256 --rounds 2"
    report = run("step", f"--before-forward {sizes}")
    for suffix in ("", ", CPU"):
        values = {row["name"]: row["values"] for row in report["rows"] if row["name"].endswith(", CPU") == bool(suffix)}
        for whole, *phases in zip(
            *(values[f"{name}{suffix}"] for name in ("all", "plan", "divide", "send", "pack")), strict=True
        ):
            assert sum(phases) == pytest.approx(whole)
    assert not report["targets"]  # from 8 million tokens on
