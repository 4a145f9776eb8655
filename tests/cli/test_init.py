"""`init` with the wheel alone, in an empty folder. That the files train: the tutorial's test."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.config.loader import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an environment into which the wheel is installed, beside the dependencies of this one and without the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    venv.create(folder / "environment", symlinks=True)
    python = folder / "environment/bin/python"
    packages = sysconfig.get_path("purelib", vars={"base": str(folder / "environment")})
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    options = ["--quiet", "--offline", "--no-deps", "--python", python]
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "pip", "install", *options, built], check=True, timeout=120)
    return folder / "environment"


def _run(wheel: Path, command: list[str], folder: Path) -> str:
    """What `command`, of the wheel's environment, printed; `folder` is all else that it can import."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(wheel / "bin" / command[0]), *command[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_wheel_has_all_that_it_names_and_the_files_load_and_pass_their_own_test(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = _run(wheel, ["grpo-async", "init", "my first: run", "--model", "Qwen/Qwen3-4B"], tmp_path)
    (folder,) = tmp_path.iterdir()
    monkeypatch.chdir(folder)
    config = load_config(Path("train.yaml"))
    assert config.run.name == "my-first-run"
    assert config.model.path == "Qwen/Qwen3-4B"
    assert len(Path("data.jsonl").read_text(encoding="utf-8").splitlines()) == 10
    (schema,) = re.findall(r"^# yaml-language-server: \$schema=(.+)", Path("train.yaml").read_text(encoding="utf-8"))
    assert "properties" in json.loads(Path(schema).read_text(encoding="utf-8"))
    (docs, configs) = re.findall(r"(/\S+/(?:docs|configs))\b", printed)
    assert Path(docs, "concepts.md").is_file()
    assert "path: .cache/quickstart" in _run(wheel, ["grpo-async", "validate", f"{configs}/quickstart.yaml"], tmp_path)
    for command in re.findall(r"^  ((?:python|grpo-async check-reward) .*)", printed, re.MULTILINE):
        few = ["--rows", "2"] if "check-reward" in command else []
        _run(wheel, [*shlex.split(command), *few], folder)


def test_init_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("mine = 1\n", encoding="utf-8")
    refused = CliRunner().invoke(app, ["init", str(tmp_path)])
    assert refused.exit_code == 2
    assert "rewards.py" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
