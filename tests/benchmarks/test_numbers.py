"""The arithmetic of the benchmarks, by hand."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import _models, asynchrony, gpu, push
from benchmarks.report import Report, in_turns, ratios


def _rows(report: Report) -> dict[str, tuple[float, ...]]:
    return {row["name"]: row["values"] for row in report.rows}


# -------------------------------------------------------------------------------------------------------------- the report


@pytest.mark.parametrize(
    ("value", "bound", "code"),
    [
        (1.0, {"at_most": 1.0}, 0),
        (1.01, {"at_most": 1.0}, 1),
        (0.9, {"at_least": 0.9}, 0),
        (0.89, {"at_least": 0.9}, 1),
        (float("nan"), {"at_most": 1.0}, 1),
    ],
)
def test_the_exit_code_says_whether_every_target_is_met(
    value: float, bound: dict[str, float], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("x", Namespace())
    report.target("fine", 1.0, at_most=2.0)
    report.target("ratio", value, **bound)
    assert report.finish() == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("met     fine: 1 (at most 2)")
    assert lines[-1].startswith("MISSED" if code else "met")


def test_the_json_has_machine_versions_settings_and_every_value(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = Report("x", argparse.Namespace(seed=7, folder=Path("/f"), json=file))
    report.row("step", [1, 2, 4], "s")
    report.target("step", 4.0, at_most=3.0)
    report.note("a note")
    assert report.finish() == 1
    written = json.loads(file.read_text(encoding="utf-8"))
    assert (written["settings"], written["notes"]) == ({"seed": 7, "folder": "/f"}, ["a note"])
    assert written["rows"][0]["values"] == [1.0, 2.0, 4.0]
    assert written["targets"] == [{"what": "step", "value": 4.0, "at_most": 3.0, "at_least": None, "met": False}]
    assert {"processor", "cpus", "memory_gib", "gpus", "system"} <= set(written["machine"])
    assert {"python", "grpo-async", "torch"} <= set(written["versions"])


def test_variants_take_turns_and_ratios_are_within_a_round() -> None:
    assert list(in_turns(["a", "b", "c"], 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a")]
    assert ratios({"a": [2.0, 9.0], "b": [1.0, 3.0]}, "a", "b") == [2.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        ratios({"a": [2.0, 9.0], "b": [1.0]}, "a", "b")


# --------------------------------------------------------------------------------------------------------------------- gpu

SMALL = _models.ModelShape(vocab=10, hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=8)
PEAKS = _models.Peaks(flops=1e6, memory=1e4)


def test_parameters_and_flops_are_those_of_the_formula() -> None:
    # a layer: q 4x4, o 4x4, k 4x2, v 4x2 = 48; MLP 3 x 4 x 8 = 96; two layers 288; head 10 x 4 = 40
    assert SMALL.num_parameters == 328
    assert SMALL.forward_flops(5) == 656 + 160  # 2 x 328 + 4 x 2 layers x 4 x 5 tokens
    assert SMALL.training_flops(9) == 1968 + 480  # 6 x 328 + 6 x 2 x 4 x (9 + 1)
    assert SMALL.kv_bytes(2) == 2 * 2 * 2 * 2


def test_a_model_has_the_parameters_that_are_counted() -> None:
    for shape in (SMALL, replace(SMALL, tied=False)):
        norms = 4 * (2 * shape.layers + 1) + 2 * 2 * shape.layers  # hidden: two of a layer and the last; heads: q and k
        assert sum(each.numel() for each in shape.build(seed=0).parameters()) == shape.num_stored + norms


def test_generation_is_bound_by_bytes_with_few_in_flight_and_by_flops_with_many() -> None:
    # one: a step reads 656 + 5 x 16 = 736 bytes: 73.6 ms, computes 816: 0.8 ms; 2 steps; the prompt of 4: 4 x (656 + 64) / 1e6
    bound_s = 2 * 0.0736 + 4 * 720 / 1e6
    one = _models.generation_bound_s(SMALL, PEAKS, in_flight=1, prompt=4, completion=2, itemsize=2)
    assert one == pytest.approx(bound_s)
    fast_memory = _models.Peaks(flops=1e6, memory=1e12)
    many = _models.generation_bound_s(SMALL, fast_memory, in_flight=100, prompt=4, completion=2, itemsize=2)
    assert many == pytest.approx(2 * 100 * 816 / 1e6 + 400 * 720 / 1e6)


def test_a_listed_gpu_is_found_and_without_any_the_exit_code_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [_models.listed_peaks(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "Some other GPU")]
    assert [peaks and peaks.flops for peaks in found] == [989e12, 756e12, None]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "torch sees none here; `--device cpu`" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------------- push


def _push(push_s: float, **milliseconds: float) -> dict[str, float]:
    phases = {f"sync/phase/{phase}_s": 0.001 for phase in push.PHASES}
    phases |= {f"sync/phase/{phase}_s": value / 1e3 for phase, value in milliseconds.items()}
    return {**phases, "sync/push_s": push_s, "sync/stopped_s": 0.25, "sync/bytes": 4e8, "sync/bytes_per_s": 2e9}


def test_a_push_is_compared_with_the_broadcast_and_the_load_of_its_own_round(tmp_path: Path) -> None:
    """Bounds of 1.2 x 1 + 0.8 = 2 s and 1.2 x 0.5 + 0.4 = 1 s: pushes of 1 s, 1.1 s and 1.8 s are 0.5, 1.1 and 0.9 of them."""
    measured = push.Measured(
        pushes=[_push(1.0), _push(1.1), _push(1.8)],
        load_s=[0.8, 0.4, 0.8],
        bare_s=[1.0, 0.5, 1.0],
    )
    file = tmp_path / "push.json"
    options = {"json": file, "seed": 0, "dtype": "float32", "engine": "vllm", "transport": "gloo", "device": "cpu",
               "bucket_mb": None}  # fmt: skip
    assert push._report(measured, Namespace(**options)) == 0
    found = json.loads(file.read_text())
    values = {(row["name"], row["unit"]): row["values"] for row in found["rows"]}
    assert values["push / (1.2 x bare + load)", "ratio"] == pytest.approx([0.5, 1.1, 0.9])
    (target,) = found["targets"]
    assert (target["value"], target["at_most"], target["met"]) == (pytest.approx(0.9), 1.0, True)
    assert values["push", "ms"] == pytest.approx([1000.0, 1100.0, 1800.0])
    assert values["bare broadcast", "MB/s"] == pytest.approx([400.0, 800.0, 400.0])
    measured.bare_s[:] = [0.1, 0.1, 0.1]
    assert push._report(measured, Namespace(**options)) == 1


# -------------------------------------------------------------------------------------------------------------- asynchrony


def _line(step: int, wall: float, *, trainer_idle: float, generator_idle: float) -> dict[str, float]:
    return {
        "step": step,
        "step_time": wall,
        "pipeline/trainer_idle_ratio": trainer_idle,
        "pipeline/generator_idle_ratio": generator_idle,
        "pipeline/training_fraction": 0.5,
        "pipeline/pushing_fraction": 0.1,
        "perf/trained_tokens_per_s": 100.0 * step,
        "async/staleness_mean": 1.0,
    }


def test_the_steady_state_is_weighted_by_time() -> None:
    lines = [
        _line(1, 9.0, trainer_idle=0.9, generator_idle=0.0),
        _line(2, 2.0, trainer_idle=0.5, generator_idle=0.25),
        _line(3, 4.0, trainer_idle=0.0, generator_idle=0.375),
        _line(4, 1.0, trainer_idle=0.0, generator_idle=1.0),
    ]
    found = asynchrony.statistics_of(lines, skip=1, last=1)
    expected = {
        "step": 3.0,  # (2 + 4) / 2
        "waiting for samples": 0.5,  # 2 x 0.5 / 2
        "server busy": 2.0,  # (1.5 + 2.5) / 2
        "servers idle": 1 / 3,
        "trainer idle": 1 / 6,
        "overlap efficiency": 5 / 6,  # the trainer's 5 s of 6
        "trained tokens": (200 * 2 + 300 * 4) / 6,
        "training": 1.5,
        "push": 0.3,
        "all steps": 16.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def _run(step: float, waiting: float, *, tokens: float = 100.0, overlap: float = 0.6) -> dict[str, float]:
    known = {"step": step, "waiting for samples": waiting, "trained tokens": tokens, "overlap efficiency": overlap}
    return {**dict.fromkeys(asynchrony.UNITS, 0.0), **known}


def test_the_median_of_the_pairs_decides_with_the_ideal_of_each_pair() -> None:
    """Pairs of 5 s (2 waiting) and of 4 s (1 waiting), whose ideals are 5/3 and 4/3."""
    runs = {
        asynchrony.SYNCHRONOUS: [_run(5.0, 2.0), _run(4.0, 1.0), _run(5.0, 2.0)],
        asynchrony.ASYNCHRONOUS: [
            _run(seconds, 0.0, tokens=150.0, overlap=overlap)
            for seconds, overlap in ((4.0, 0.95), (4.0, 0.8), (3.0, 0.99))
        ],
    }
    report = Report("asynchrony", Namespace())
    asynchrony._report(report, runs)
    rows = _rows(report)
    assert rows["speed-up"] == pytest.approx([5 / 4, 4 / 4, 5 / 3])
    assert rows["speed-up in trained tokens"] == pytest.approx([1.5] * 3)
    assert rows["ideal speed-up, (g + t) / max(g, t)"] == pytest.approx([5 / 3, 4 / 3, 5 / 3])
    assert rows["speed-up / ideal"] == pytest.approx([0.75, 0.75, 1.0])
    found = [(target.what, target.value, target.met) for target in report.targets]
    assert found == [
        ("speed-up / ideal", pytest.approx(0.75), False),
        ("overlap efficiency", 0.95, True),
    ]
