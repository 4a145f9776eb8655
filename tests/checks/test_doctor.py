"""The doctor: the real machine, and each finding with the machine changed; how checks run apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_async.checks import doctor
from grpo_async.checks.report import run_check

REPOSITORY = Path(__file__).parents[2]


def test_it_runs_without_torch_and_transformers() -> None:
    program = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
from grpo_async.cli import main
main(["doctor"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr  # torch is there by its metadata and cannot be imported
    lines = {" ".join(line.split()[:2]): line for line in done.stdout.splitlines()}
    assert "cannot be imported (No module named 'torch')" in lines["fail torch"]
    assert "pass limits" in lines or "warn limits" in lines


SMI_LINE = "0, NVIDIA H100 80GB HBM3, 570.86.15, 81559\n"


@pytest.mark.parametrize(
    ("output", "code", "status", "words"),
    [
        (SMI_LINE, 0, "pass", "H100"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "fail", "version mismatch"),
        ("", None, "fail", "timed out"),
    ],
)
def test_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int | None, status: str, words: str
) -> None:
    """The program is a stand-in: this machine may have no GPU."""
    (tmp_path / "answer").write_text(output)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{'exec sleep 20' if code is None else f'cat {tmp_path}/answer; exit {code}'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "_NVIDIA_SMI_TIMEOUT_S", 1.0)
    found = run_check("gpus", doctor.check_gpus)
    assert (found.status, words in found.detail) == (status, True), found
