"""The log-probability benchmark, small: both parts, memory and time. Its targets at full size: tests/training/test_logprobs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.support import run_apart

SIZES = {
    "logprobs": ["--tokens", "512", "--vocab", "30000", "--hidden", "32", "--chunk", "16"],
    "attention": [
        "--row-tokens",
        "256",
        "--sample-tokens",
        "32",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--head-dim",
        "16",
    ],
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "ours", "plain"), [("logprobs", "chunked", "full"), ("attention", "samples", "dense")]
)
def test_both_variants_compute_the_same_and_are_compared(tmp_path: Path, part: str, ours: str, plain: str) -> None:
    report = tmp_path / "report.json"
    code = run_apart(
        "logprobs", ["--part", part, *SIZES[part], "--rounds", "2", "--device", "cpu", "--json", str(report)]
    )
    assert code in (0, 1)  # 1: by the time, which so small a step does not tell
    found = json.loads(report.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert rows[f"{ours} / {plain}: time"]["n"] == 2
    assert rows[f"{plain}: memory with gradients"]["median"] > 0.0
    assert rows["difference of loss and gradient"]["median"] < 1e-3
    if part == "logprobs":
        # 512 x 30000 x 4 bytes = 61 MB, of which full logits hold at least two at a time; chunks of 16 hold 2 MB, and
        # the process's first call some 80 more, whatever the size
        assert rows["full: memory beyond gradients"]["median"] > 120.0
        assert rows["chunked / full: memory beyond gradients"]["median"] < 0.8
