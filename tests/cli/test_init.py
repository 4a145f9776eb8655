"""`init`: every starter is whole, from an empty folder to trained steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.config.loader import load_config
from tests.support.chat_families import TEMPLATES

FLAGS = ([], ["--tools"], ["--env"], ["--agent"], ["--math"], ["--code"])
starters = pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: (flags or ["reward"])[0].strip("-"))
NOISE = """
import itertools
numbers = itertools.count()
def noise(completions, **_):
    return [float(next(numbers) % 2) for _ in completions]
"""


def _run(command: list[str], folder: Path) -> str:
    """What it printed; it has to end with 0. `folder` is all that it can import besides what is installed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@starters
def test_a_starter_loads_passes_its_own_test_and_its_rewards_hold(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(app, ["init", str(tmp_path / "my first: run"), *flags, "--model", "Qwen/Qwen3-4B"])
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.iterdir()
    monkeypatch.chdir(folder)
    config = load_config(Path("train.yaml"))
    assert config.run.name == "my-first-run"
    assert config.model.path == "Qwen/Qwen3-4B"
    assert len(Path("data.jsonl").read_text(encoding="utf-8").splitlines()) == 10
    _run(["pytest", "-q", "-p", "no:cacheprovider"], folder)
    if config.rewards:
        _run(["grpo_async", "check-reward", "train.yaml"], folder)


def test_init_replaces_nothing_and_takes_one_kind(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("mine = 1\n", encoding="utf-8")
    refused = CliRunner().invoke(app, ["init", str(tmp_path)])
    assert refused.exit_code == 2
    assert "rewards.py" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
    assert CliRunner().invoke(app, ["init", str(tmp_path / "new"), "--tools", "--math"]).exit_code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.nightly
@pytest.mark.slow
@starters
def test_a_starter_trains_two_steps(flags: list[str], tmp_path: Path, tiny_model: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        (TEMPLATES / "qwen2_5.jinja").read_text(encoding="utf-8"), encoding="utf-8"
    )
    folder = tmp_path / "start"
    _run(["grpo_async", "init", str(folder), *flags, "--model", str(model)], tmp_path)
    (folder / "noise.py").write_text(
        NOISE, encoding="utf-8"
    )  # a random model earns nothing, and equal rewards teach nothing
    own = yaml.safe_load((folder / "train.yaml").read_text(encoding="utf-8")).get("rewards", [])
    settings = (
        f"rewards={json.dumps([*own, {'function': 'noise:noise'}])}",
        "inference.engine=embedded",
        "training.max_steps=2",
        "optimizer.warmup_steps=0",
        "rollout.max_completion_tokens=48",
        "rollout.group_size=4",
    )
    _run(["grpo_async", "train", "train.yaml", *(part for setting in settings for part in ("--set", setting))], folder)
    summary = json.loads((folder / "runs/start/summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 2
