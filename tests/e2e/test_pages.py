"""The commands of the README and of the pages work as they stand there, and the table of guarantees names tests that are run."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from grpo_async.cli.app import app
from tests.e2e.conftest import GoldenRun
from tests.e2e.support import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "docs" / "howto").glob("*.md")),
]
READERS = ("status", "inspect-rollouts", "report", "trace", "export", "export-model")


def _commands() -> list[str]:
    found = []
    for page in PAGES:
        if page.name == "tutorial.md":
            continue  # they have a test of their own
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S
        ):
            if language in ("", "bash"):
                lines = [
                    line.removeprefix("$ ").partition("  #")[0].strip()
                    for line in block.replace("\\\n", " ").splitlines()
                ]
                # a fork needs a run to begin from: tests/e2e/test_kill_nine.py
                is_one = (line for line in lines if line.startswith("grpo-async ") and "--fork" not in line)
                found += [line for line in is_one if "CONFIG" not in line]
    return list(dict.fromkeys(found))


def _that_run(*commands: str) -> list[str]:
    return [line for line in _commands() if shlex.split(line)[1] in commands]


def _invoke(words: Sequence[str], folder: Path = REPOSITORY) -> Result:
    """In this process: most of what a short command takes is to start Python and to import."""
    with contextlib.chdir(folder):
        return CliRunner().invoke(app, list(words))


def _without_choices(line: str) -> str:
    """As a dry run of it is."""
    return line.replace(" --resume", "").replace(" --dry-run", "")


@pytest.mark.parametrize("line", dict.fromkeys(map(_without_choices, _that_run("train", "validate"))))
def test_a_command_that_trains_is_understood(line: str, tmp_path: Path) -> None:
    """`validate` runs as it stands, `train` as a dry run."""
    words = shlex.split(line)[1:]
    if words[0] == "train":
        words += ["--dry-run", "--set", f"run.dir={tmp_path / 'runs'}"]
    done = _invoke(words)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "runs").exists(), "a dry run starts and writes nothing"
    assert "precision  float32 master weights, computed" in done.stdout
    if words[0] == "train":
        assert not {"compute_dtype: null", "dtype: null"} & set(map(str.strip, done.stdout.splitlines()))


@pytest.mark.parametrize("line", _that_run("launch", "doctor", "explain"))
def test_a_command_that_needs_no_run_says_something(line: str) -> None:
    done = _invoke(shlex.split(line)[1:])
    assert done.exit_code in (0, 1) if "doctor" in line else done.exit_code == 0, done.output
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("line", _that_run(*READERS))
def test_a_command_that_reads_a_run_works_on_one(line: str, golden_run: GoldenRun, tmp_path: Path) -> None:
    """Its run, group and file are replaced by those that are here."""
    name, *words = shlex.split(line)[1:]
    folder = str(golden_run.run.folder)
    values = {"--group": "1"}
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if before in values:
            words[place] = values[before]
        elif before == "--out":
            words[place] = str(tmp_path / Path(word).name)
        elif word in ("other", "long"):
            words[place] = str(shutil.copytree(folder, tmp_path / word))
        elif word in ("mine", "short", "quickstart", "sums", "NAME") or word.startswith("runs/"):
            words[place] = folder
    if name == "status" and not words:
        words = [folder]  # without one it is the newest under ./runs
    if name == "export-model":
        words += ["--out", str(tmp_path / "model")]
    if name == "report":
        words += ["--out", str(tmp_path / "report.html")]
    read = _invoke([name, *words])
    assert read.exit_code == 0, read.output


@pytest.mark.slow
@pytest.mark.nightly
def test_the_commands_of_the_tutorial_lead_from_init_to_a_model(quickstart_files: None, tmp_path: Path) -> None:
    """In their order, from its second part on; two steps, and few prompts to evaluate on."""
    text = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (tmp_path / ".cache").symlink_to(REPOSITORY / ".cache")
    lines = [
        line for block in re.findall(r"^```bash\n(.*?)^```$", text, flags=re.M | re.S) for line in block.splitlines()
    ]
    assert lines[:3] == ["./scripts/quickstart.sh", lines[1], "cd my-run"]
    few = ["--set", "training.max_steps=2", "--set", "optimizer.warmup_steps=0", "--set", "evaluation.num_prompts=8"]
    folder, (config,) = tmp_path / "my-run", re.findall(r"^```yaml\n# sums.yaml\n(.*?)^```$", text, flags=re.M | re.S)
    for line in (lines[1], *lines[3:]):
        words = shlex.split(line.replace("--step 26", "--step 1").replace("sums@25", "sums@2"))[1:]
        if words[0] in READERS:
            read = _invoke(words, folder)
            assert read.exit_code == 0, line + read.output
            continue
        words += few if words[0] == "train" and "--dry-run" not in words else []
        words += ["--set", "training.max_steps=3"] if "--fork" in words else []
        done = subprocess.run(
            [sys.executable, "-m", "grpo_async", *words],
            cwd=folder if folder.exists() else tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, line + done.stdout[-3000:] + done.stderr[-3000:]
        (folder / "sums.yaml").write_text(config, encoding="utf-8")
    assert (folder / "runs" / "sums" / "model" / "model.safetensors").exists()
    assert (folder / "runs" / "sums" / "model_step_2" / "model.safetensors").exists()


def _guarantees() -> list[tuple[str, list[Path], str]]:
    """(what, files of its tests, commands that run them) of each row of the table."""
    section = (REPOSITORY / "docs" / "guarantees.md").read_text().partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    found = []
    for what, _, tests, commands in rows:
        folder, files = REPOSITORY, []
        for name in re.findall(r"`([\w/]*(?:\.py|/))`", tests):
            file = REPOSITORY / name if name.startswith("tests/") else folder / name
            folder = file.parent
            files.append(file)
        found.append((what, files, commands))
    return found


def test_every_guarantee_has_tests_that_the_named_command_runs() -> None:
    guarantees = _guarantees()
    assert len(guarantees) > 30
    for what, files, commands in guarantees:
        assert files, what
        for file in files:
            assert file.exists(), f"{what}: {file}"
            modules = sorted(file.rglob("test_*.py")) if file.is_dir() else [file]
            in_default = [module for module in modules if _has_a_test_of_the_default(module)]
            assert bool(in_default) == ("`test.sh`" in commands), f"{what}: {file} is run by {commands}"


def _has_a_test_of_the_default(module: Path) -> bool:
    tree = ast.parse(module.read_text())
    if any(
        "nightly" in ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)
    ):
        return False
    tests = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")
    ]
    return any("pytest.mark.nightly" not in map(ast.unparse, test.decorator_list) for test in tests)
