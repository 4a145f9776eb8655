"""scripts/quickstart.sh in a checkout whose bootstrap and command are stand-ins that record how they are called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in {
        "scripts/bootstrap.sh": 'echo "bootstrap $*" >> calls',
        ".venv/bin/grpo-async": 'echo "grpo-async $*" >> calls',
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        file.chmod(0o755)
    shutil.copy(ROOT / "scripts/quickstart.sh", tmp_path / "scripts")
    return tmp_path


def _calls(checkout: Path, *arguments: str) -> list[str]:
    (checkout / "calls").unlink(missing_ok=True)
    subprocess.run([checkout / "scripts/quickstart.sh", *arguments], cwd="/", check=True, timeout=30)
    return (checkout / "calls").read_text(encoding="utf-8").splitlines()


def test_it_installs_prepares_and_trains_a_run_of_its_own_and_resumes_the_newest(checkout: Path) -> None:
    assert _calls(checkout) == [
        "bootstrap ",
        "grpo-async prepare-quickstart",
        "grpo-async train configs/quickstart.yaml --set run.name=quickstart-1",
    ]
    (checkout / "runs/quickstart-1").mkdir(parents=True)
    assert _calls(checkout)[2].endswith("run.name=quickstart-2")
    assert _calls(checkout, "--resume")[2].endswith("--set run.name=quickstart-1 --resume")


def test_it_passes_arguments_on_and_knows_its_own(checkout: Path) -> None:
    calls = _calls(checkout, "--vllm", "--seed", "3", "--set", "training.max_steps=2")
    assert calls[0] == "bootstrap --with-vllm"
    assert calls[2] == (
        "grpo-async train configs/quickstart-vllm.yaml --set run.name=quickstart-vllm-1 --set run.seed=3 "
        "--set training.max_steps=2"
    )


def test_resume_without_a_run_is_refused(checkout: Path) -> None:
    result = subprocess.run(
        [checkout / "scripts/quickstart.sh", "--resume"], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 2
    assert "nothing to resume" in result.stderr
    assert not (checkout / "calls").exists()
