"""The GPU benchmark: its bounds by hand, its refusal without a GPU, and the same code on a CPU."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _gpu_bounds as bounds
from benchmarks import _gpu_generate, gpu
from benchmarks.report import Report
from tests.benchmarks.support import run_apart

SMALL = bounds.ModelSize(vocab=10, hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=8)
PEAKS = bounds.Peaks(flops=1e6, memory=1e4, source="test")


def test_parameters_and_flops_are_those_of_the_formula() -> None:
    # a layer: q 4x4, o 4x4, k 4x2, v 4x2 = 48; MLP 3 x 4 x 8 = 96; two layers 288; head 10 x 4 = 40
    assert SMALL.num_parameters == 328
    # 2 x 328 + 4 x 2 layers x 4 x 5 tokens
    assert SMALL.forward_flops(5) == 656 + 160
    # 6 x 328 + 6 x 2 x 4 x (9 + 1)
    assert SMALL.training_flops(9) == 1968 + 480
    assert SMALL.kv_bytes(2) == 2 * 2 * 2 * 2


def test_generation_is_bound_by_bytes_with_few_in_flight_and_by_flops_with_many() -> None:
    # one: a step reads 656 + 5 x 16 = 736 bytes: 73.6 ms, computes 816: 0.8 ms; 2 steps; the prompt of 4: 4 x (656 + 64) / 1e6
    one = bounds.generation_bound_s(SMALL, PEAKS, in_flight=1, prompt=4, completion=2, itemsize=2)
    assert one == pytest.approx(2 * 0.0736 + 4 * 720 / 1e6)
    fast_memory = bounds.Peaks(flops=1e6, memory=1e12, source="test")
    many = bounds.generation_bound_s(SMALL, fast_memory, in_flight=100, prompt=4, completion=2, itemsize=2)
    assert many == pytest.approx(2 * 100 * 816 / 1e6 + 400 * 720 / 1e6)


def test_a_listed_gpu_is_found_by_its_most_exact_name() -> None:
    sxm, pcie = bounds.listed_peaks("NVIDIA H100 80GB HBM3"), bounds.listed_peaks("NVIDIA H100 PCIe")
    assert sxm is not None
    assert pcie is not None
    assert (sxm.flops, pcie.flops) == (989e12, 756e12)
    assert bounds.listed_peaks("NVIDIA L40S") != bounds.listed_peaks("NVIDIA L4")
    assert bounds.listed_peaks("Some other GPU") is None


_OPTIONS = {"seed": 0, "device": "cuda", "dtype": "bfloat16", "rounds": 2, "threads": 1, "samples": 2, "prompt_tokens": 4,
            "completion_tokens": 2, "micro_batch_tokens": 64, "engine": "vllm", "size": "0.6b"}  # fmt: skip


def _rows(report: Report) -> dict[str, tuple[float, ...]]:
    return {row.name: row.values for row in report.rows}


def test_tokens_of_all_completions_count_and_their_bound_is_the_upper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_generate, "measure", lambda folder, size, options: {1: [0.5], 100: [4.0, 8.0]})
    report = Report("gpu", {"seed": 0})
    gpu._generate(report, SMALL, PEAKS, Namespace(**_OPTIONS))
    rows = _rows(report)
    assert rows["generate: 1 in flight"] == (4.0,)
    assert rows["generate: 100 in flight"] == (50.0, 25.0)
    bound_s = 2 * 0.0736 + 4 * 720 / 1e6
    assert rows["generate: 1 in flight, bound"] == pytest.approx((2 / bound_s,))
    assert rows["generate: 1 in flight, of the bound"] == pytest.approx((bound_s / 0.5,))


def test_mfu_counts_the_tokens_of_samples_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples of 9 tokens, 2448 FLOPs each: 44064 of 1e6 a second; in a step of 0.1 s 0.44064."""
    asked: dict[str, Any] = {}
    found = {"seconds": [0.1, 0.2], "tokens": [24, 24], "lengths": [9, 9], "peak_bytes": 3 << 30}
    monkeypatch.setattr(gpu, "_in_a_process", lambda settings: asked.update(settings) or found)
    report = Report("gpu", {"seed": 0})
    gpu._train(report, SMALL, PEAKS, Namespace(**_OPTIONS))
    rows = _rows(report)
    assert asked["hidden"] == SMALL.hidden
    assert rows["train: tokens of the samples"] == pytest.approx((180.0, 90.0))
    assert rows["train: bound"] == pytest.approx((18 / 0.044064,))
    assert rows["train: MFU"] == pytest.approx((0.44064, 0.22032))
    assert rows["train: packing efficiency"] == pytest.approx((0.75, 0.75))
    assert rows["train: memory, peak"] == (3.0,)


def test_without_a_gpu_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_has_gpu", lambda: False)
    assert gpu.main([]) == 2
    assert "torch sees none here; `--device cpu" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_same_code_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    small = ["--rounds", "1", "--in-flight", "2", "--completion-tokens", "4", "--samples", "2"]
    code = run_apart("gpu", ["--device", "cpu", "--parts", "generate", "train", *small, "--json", str(file)])
    assert code == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    for name in (
        "generate: 2 in flight",
        "generate: 2 in flight, bound",
        "train: tokens of the samples",
        "train: bound",
    ):
        assert rows[name]["median"] > 0
    assert 0 < rows["train: MFU"]["median"] < 1
    assert 0 < rows["generate: 2 in flight, of the bound"]["median"] < 1
    assert any("says nothing of a GPU" in note for note in report["notes"])
