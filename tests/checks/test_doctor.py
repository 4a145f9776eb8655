"""The doctor: the real machine, and each finding with the machine changed; how checks run apart."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_async.checks import doctor
from grpo_async.checks.doctor import check_vllm
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


@pytest.mark.parametrize(("free", "shared"), [(100 << 20, "warn"), (2 << 30, "pass")])
def test_a_small_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch, free: int, shared: str) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert doctor.check_shared_memory()[0] == shared


SMI_LINE = "0, NVIDIA H100 80GB HBM3, 570.86.15, 81559\n"


@pytest.mark.parametrize(
    ("output", "code", "status", "words"),
    [
        (SMI_LINE, 0, "pass", "H100"),
        ("", 0, "warn", "lists none"),
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


@pytest.mark.parametrize(
    ("versions", "has_gpu", "has_plugin", "status", "words"),
    [
        ({}, False, True, "pass", "embedded engine"),
        ({}, True, True, "warn", "far faster"),
        ({"vllm": "0.11.0"}, False, True, "fail", "vllm 0.11.0 is installed, but only"),
        ({"vllm": "0.32.0", "torch": "2.13.0"}, False, False, "fail", "plugin"),
        ({"vllm": "0.32.0", "torch": "2.13.0+cu130"}, False, True, "pass", "supported"),
    ],
    ids=["none", "none beside a GPU", "old", "no plugin", "fine"],
)
def test_vllm_is_judged_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], has_gpu: bool, has_plugin: bool, status: str, words: str
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "has_gpu_driver", lambda: has_gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ["plugin"] if has_plugin else [])
    found = check_vllm()
    assert (found[0], words in found[1]) == (status, True), found
