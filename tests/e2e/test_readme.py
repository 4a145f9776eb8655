"""The commands of the README work as they stand there."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.support import REPOSITORY, run_command


def _commands() -> list[str]:
    text = (REPOSITORY / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_readme_shows_commands() -> None:
    commands = _commands()
    assert commands[:2] == ["./scripts/quickstart.sh", "./scripts/test.sh"]
    assert len(commands) >= 6


@pytest.mark.parametrize(
    "line", [line for line in _commands() if line.startswith(("grpo-async train ", "grpo-async validate "))]
)
def test_a_readme_command_is_understood(line: str, tmp_path: Path) -> None:
    """`validate` runs as it stands, `train` as a dry run; the options of the others: tests/test_docs.py."""
    words = shlex.split(line)[1:]
    if words[0] == "train":
        words = [word for word in words if word != "--resume"] + ["--dry-run", "--set", f"run.dir={tmp_path / 'runs'}"]
    done = run_command(*words, timeout_s=60.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "runs").exists(), "a dry run starts and writes nothing"
    assert "precision  float32 masters, computed" in done.stdout
    if "--dry-run" in words:
        assert not {"compute_dtype: null", "dtype: null"} & set(map(str.strip, done.stdout.splitlines()))


def _guarantees() -> list[tuple[str, list[Path], str]]:
    """(what, files of its tests, commands that run them) of each row of the table."""
    section = (REPOSITORY / "README.md").read_text().partition("## Guarantees")[2].partition("\n## ")[0]
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


def test_every_guarantee_of_the_readme_has_tests_that_the_named_command_runs() -> None:
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
        n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")
    ]
    return any("pytest.mark.nightly" not in map(ast.unparse, test.decorator_list) for test in tests)
