"""The scripts of a bare checkout: what is installed where, and that they do what the README says, tried without installing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_async.checks.config_checks import check_inputs
from grpo_async.config.loader import load_config
from grpo_async.errors import ConfigError
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.extras import EXTRAS
from scripts import install
from scripts.install import torch_attempts

ROOT = Path(__file__).parents[2]


def _program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)


def test_torch_for_cpus_comes_from_where_pip_looks_then_from_its_own_index_then_it_is_the_cuda_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRPO_ASYNC_TORCH_INDEX", "https://me:secret@mirror/cpu")
    assert list(torch_attempts("cpu", "torch==2.13.*", "2.13.0")) == [
        ("what pip is told to use", ["torch==2.13.0+cpu"]),
        ("https://***@mirror/cpu", ["--default-index", "https://me:secret@mirror/cpu", "torch==2.13.0+cpu"]),
        ("the default index", ["torch==2.13.*"]),
    ]
    assert [arguments for _, arguments in torch_attempts("cuda", "torch==2.13.*", "2.13.0")] == [["torch==2.13.*"]]


def test_a_gpu_and_the_variable_choose_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    _program(tmp_path / "nvidia-smi", "exit 9")  # as on a machine with a driver and no GPU
    assert install.choose_torch("auto", "Linux") == "cpu"
    _program(tmp_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    assert install.choose_torch("auto", "Linux") == "cuda"
    assert install.choose_torch("cpu", "Linux") == "cpu"
    assert install.choose_torch("auto", "Darwin") == "default"


def test_quickstart_installs_prepares_and_trains_a_run_of_its_own_and_resumes_the_newest(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("scripts/bootstrap.sh", ".venv/bin/grpo-async"):
        _program(tmp_path / name, f'echo "{Path(name).name} $*" >> calls')

    def calls(*arguments: str) -> list[str]:
        (tmp_path / "calls").unlink(missing_ok=True)
        script = tmp_path / "scripts/quickstart.sh"
        done = subprocess.run([script, *arguments], cwd="/", timeout=30, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            return [done.stderr]
        return (tmp_path / "calls").read_text(encoding="utf-8").splitlines()

    assert "nothing to resume" in calls("--resume")[0]
    assert calls() == [
        "bootstrap.sh ",
        "grpo-async prepare-quickstart",
        "grpo-async train configs/quickstart.yaml --set run.name=quickstart-1",
    ]
    (tmp_path / "runs/quickstart-1").mkdir(parents=True)
    assert calls()[2].endswith("run.name=quickstart-2")
    assert calls("--resume")[2].endswith("--set run.name=quickstart-1 --resume")
    vllm = calls("--vllm", "--seed", "3")
    assert vllm[0] == "bootstrap.sh --with-vllm"
    assert vllm[2] == "grpo-async train configs/quickstart-vllm.yaml --set run.name=quickstart-vllm-1 --set run.seed=3"


def test_the_dockerfile_for_gpus_has_the_pinned_vllm() -> None:
    pin = re.search(r"^vllm==(\S+)", (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pin
    assert f"vllm-openai:v{pin[1]}\n" in (ROOT / "docker/cuda.Dockerfile").read_text(encoding="utf-8")


def test_both_images_install_what_the_shipped_configs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the checks before a run ask for it, where no optional library is installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in EXTRAS else find_spec(name))
    monkeypatch.delitem(sys.modules, "grpo_async.rewards.math", raising=False)
    needed: set[str] = set()
    for file in (ROOT / "configs").glob("*.yaml"):
        try:
            check_inputs(load_config(file), engine=EngineChoice(engine="external", reason=""))
        except ConfigError as error:
            needed |= set(re.findall(r"grpo-async\[(\w+)\]", str(error)))
    assert needed >= {"hub", "lora", "math"}
    for image in ("cpu", "cuda"):
        text = (ROOT / f"docker/{image}.Dockerfile").read_text(encoding="utf-8")
        (installed,) = re.findall(r"(?:--with |\.\[)([\w,]+)", text)
        assert needed <= set(installed.split(",")), image


def test_every_dependency_is_pinned_by_version_alone_to_one_that_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project["project"]["dependencies"] + project["dependency-groups"]["test"]
    asked += [text for extra in project["project"]["optional-dependencies"].values() for text in extra]
    text = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.match(r"[A-Za-z0-9._-]+==[\w.]+( ; .+)?$", line) for line in lines)
    assert "torch==2.13.0" in lines, "a pin with a local part (+cpu) would exclude the other builds"
    versions: dict[str, list[str]] = {}
    for pin in map(Requirement, lines):
        versions.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    for each in asked:
        requirement = Requirement(each)
        found = versions.get(canonicalize_name(requirement.name), [])
        assert found, f"{each} has no pin: scripts/update-constraints"
        assert all(requirement.specifier.contains(version) for version in found), f"{each} forbids its pin {found}"
