"""The command line as a process of its own: what it imports, what it exits with, what it does with signals and pipes."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.support import MINIMAL
from tests.store.builders import append_simple, new_store

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "datasets")
NOT_FOR_HELP = (*HEAVY, "duckdb", "starlette", "uvicorn", "numpy", "httpx", "aiohttp")
# runs command lines (joined by +) in this process and prints which of the heavy libraries it loaded
LOADED = f"""
import sys
from grpo_async.cli import main
for arguments in " ".join(sys.argv[1:]).split(" + "):
    try:
        main(arguments.split())
    except SystemExit as end:
        assert not end.code, end.code
print("LOADED", [name for name in {NOT_FOR_HELP!r} if name in sys.modules])
"""


def _python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.yaml").write_text(MINIMAL, encoding="utf-8")
    with new_store(tmp_path / "runs" / "demo") as store:
        append_simple(store, 0)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        "--help + train --help + eval --help + export --help + report --help + doctor --help",
        "schema + validate x.yaml",
        "inspect-rollouts --help + inspect-rollouts demo --rollout 0-1",
    ],
)
def test_a_light_command_loads_no_heavy_library(folder: Path, arguments: str) -> None:
    done = _python("-c", LOADED, arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    reads_rollouts = {"duckdb", "numpy"} if "--rollout" in arguments else set()
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1].removeprefix("LOADED ")))
    assert loaded - reads_rollouts == set()


def test_an_interrupt_ends_a_command_with_130(folder: Path) -> None:
    script = """
import os, signal, sys
import grpo_async.launcher.train
from grpo_async.cli import main
def run(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
grpo_async.launcher.train.launch = run
main(["train", "x.yaml"])
"""
    done = _python("-c", script, folder=folder)
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
