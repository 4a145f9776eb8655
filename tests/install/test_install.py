"""The scripts of a bare checkout: what is installed where, and that they do what the README says, tried without installing."""

from __future__ import annotations

import importlib.util
import json
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
from scripts.install import Installed, digest, torch_attempts

ROOT = Path(__file__).parents[2]
NAMES = ("bootstrap.sh", "quickstart.sh", "test.sh", "check", "update-constraints", "install-browser", "release")
SCRIPTS = [*(ROOT / "scripts" / name for name in NAMES), ROOT / ".ci/run"]


def _program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the scripts but no .venv; `programs/` stands first on PATH."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    _program(tmp_path / "programs/nvidia-smi", "exit 9")  # as on a machine with a driver and no GPU
    return tmp_path


def _bootstrap(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    python = getattr(sys, "_base_executable", sys.executable)
    given = {"PATH": f"{checkout}/programs:{os.environ['PATH']}", "HOME": str(checkout), "PYTHON": python} | environment
    command = [str(checkout / "scripts/bootstrap.sh"), *arguments]
    return subprocess.run(command, cwd="/", env=given, capture_output=True, text=True, timeout=60, check=False)


# ---- what is installed ----


def test_torch_for_cpus_comes_from_where_pip_looks_then_from_its_own_index_then_it_is_the_cuda_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRPO_ASYNC_TORCH_INDEX", "https://me:secret@mirror/cpu")
    assert list(torch_attempts("cpu", "torch==2.13.*", "2.13.0")) == [
        ("what pip is told to use", ["torch==2.13.0+cpu"]),
        (
            "https://***@mirror/cpu",
            ["--default-index", "https://me:secret@mirror/cpu", "torch==2.13.0+cpu"],
        ),
        ("the default index", ["torch==2.13.*"]),
    ]
    assert [arguments for _, arguments in torch_attempts("cuda", "torch==2.13.*", "2.13.0")] == [["torch==2.13.*"]]


def test_a_gpu_and_the_variable_choose_the_build(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{checkout}/programs:{os.environ['PATH']}")
    assert install.choose_torch("auto", "Linux") == "cpu"
    _program(checkout / "programs/nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    assert install.choose_torch("auto", "Linux") == "cuda"
    assert install.choose_torch("cpu", "Linux") == "cpu"
    assert install.choose_torch("auto", "Darwin") == "default"


def test_settings_of_pip_reach_uv() -> None:
    listed = (
        ":env:.cert='/other.pem'\n"
        "global.cert='/ca.pem'\n"
        "global.extra-index-url='https://a https://b'\n"
        "global.find-links='\\n/a\\n/b'\n"
        "install.index-url='https://near'\n"
        "global.index-url='https://far'\n"
        "global.timeout='3'\n"
    )
    assert install.read_pip_settings(listed) == {
        "UV_DEFAULT_INDEX": "https://near",
        "UV_INDEX": "https://a https://b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": "/other.pem",
    }
    assert install.pip_settings(Path(sys.executable)).keys() <= {*install._PIP_TO_UV.values(), "UV_INDEX_STRATEGY"}


# ---- bootstrap.sh ----


def test_an_installation_serves_a_call_that_asks_for_less(checkout: Path) -> None:
    site = checkout / f".venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    stamp = checkout / ".venv/grpo-async-install.json"
    installed = {"checkout": str(checkout.resolve()), "inputs": digest(checkout), "torch": "cpu"}
    stamp.write_text(json.dumps({**installed, "features": ["math", "tests"]}))
    assert install.read_stamp(stamp) == Installed(**installed, features=["math", "tests"])
    done = _bootstrap(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is ready (with math, tests; torch cpu)" in done.stdout
    # an older one, one of another folder or with less is not enough: here there is no compiler, so that nothing is installed
    for changes in ({"inputs": "older"}, {"torch": "cuda"}):
        stamp.write_text(json.dumps({**installed, **changes, "features": ["math", "tests"]}))
        done = _bootstrap(checkout, "--with-tests", PATH=f"{_without_compiler(checkout)}", GRPO_ASYNC_TORCH="cpu")
        assert (done.returncode, "C compiler" in done.stderr) == (2, True), done.stdout + done.stderr
        assert stamp.exists(), "what is refused changes nothing"


def _without_compiler(checkout: Path) -> Path:
    for name in ("bash", "dirname"):
        (checkout / "programs" / name).unlink(missing_ok=True)
        (checkout / "programs" / name).symlink_to(shutil.which(name) or name)
    return checkout / "programs"


def test_what_is_wrong_with_the_call_or_the_python_is_said(checkout: Path) -> None:
    done = _bootstrap(checkout, "--with", "mats")
    assert done.returncode == 2
    assert "unknown extra mats; known: agents, docs, " in done.stderr
    programs = _without_compiler(checkout)
    _program(programs / "python3", "exit 1")  # as Python 3.9 would answer
    done = _bootstrap(checkout, PATH=str(programs), PYTHON="")
    assert done.returncode == 2
    assert "no 64-bit Python 3.11, 3.12 or 3.13 found" in done.stderr
    python = getattr(sys, "_base_executable", sys.executable)
    _program(programs / "python3", f'case "$2" in *ensurepip*) exit 1;; esac; exec {python} "$@"')
    done = _bootstrap(checkout, PYTHON=str(programs / "python3"))
    assert done.returncode == 2
    assert f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv" in done.stderr


# ---- the other scripts ----


def test_quickstart_installs_prepares_and_trains_a_run_of_its_own_and_resumes_the_newest(checkout: Path) -> None:
    for name in ("scripts/bootstrap.sh", ".venv/bin/grpo-async"):
        _program(checkout / name, f'echo "{Path(name).name} $*" >> calls')

    def calls(*arguments: str) -> list[str]:
        (checkout / "calls").unlink(missing_ok=True)
        script = checkout / "scripts/quickstart.sh"
        done = subprocess.run([script, *arguments], cwd="/", timeout=30, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            return [done.stderr]
        return (checkout / "calls").read_text(encoding="utf-8").splitlines()

    assert "nothing to resume" in calls("--resume")[0]
    assert calls() == [
        "bootstrap.sh ",
        "grpo-async prepare-quickstart",
        "grpo-async train configs/quickstart.yaml --set run.name=quickstart-1",
    ]
    (checkout / "runs/quickstart-1").mkdir(parents=True)
    assert calls()[2].endswith("run.name=quickstart-2")
    assert calls("--resume")[2].endswith("--set run.name=quickstart-1 --resume")
    vllm = calls("--vllm", "--seed", "3", "--set", "training.max_steps=2")
    assert vllm[0] == "bootstrap.sh --with-vllm"
    assert vllm[2] == (
        "grpo-async train configs/quickstart-vllm.yaml --set run.name=quickstart-vllm-1 --set run.seed=3 "
        "--set training.max_steps=2"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_parses_and_is_executable(script: Path) -> None:
    assert os.access(script, os.X_OK), f"chmod +x {script}"
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_dockerfiles_hold_to_the_rules_and_to_the_pinned_vllm() -> None:
    files = sorted((ROOT / "docker").glob("*.Dockerfile"))
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert (len(files), result.returncode, result.stdout) == (2, 0, "")
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
