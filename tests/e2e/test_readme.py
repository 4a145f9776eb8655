"""The commands of the README work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import REPOSITORY


def _commands() -> list[str]:
    text = (REPOSITORY / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def _run(*command: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ
    )


def test_the_readme_shows_commands() -> None:
    commands = _commands()
    assert commands[:2] == ["./scripts/quickstart.sh", "./scripts/test.sh"]
    assert len(commands) >= 6


@pytest.mark.parametrize("line", [line for line in _commands() if line.startswith("grpo-async ")])
def test_a_readme_command_is_understood(line: str, tmp_path: Path) -> None:
    """`validate` runs as it stands, `train` as a dry run, the others as far as parsing their options."""
    words = shlex.split(line)[1:]
    if words[0] == "train":
        words = [word for word in words if word != "--resume"] + ["--dry-run", "--set", f"run.dir={tmp_path}"]
    elif words[0] != "validate":
        words.append("--help")
    done = _run(sys.executable, "-m", "grpo_async", *words, timeout_s=60.0)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_quickstart_script_trains_and_prints_its_summary(tmp_path: Path) -> None:
    settings = [
        f"run.dir={tmp_path}",
        "training.max_steps=2",
        "optimizer.warmup_steps=0",
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "evaluation.num_prompts=8",
    ]
    done = _run("./scripts/quickstart.sh", *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for word in ("reward", "held out", "tokens/s", "idle", "staleness", "closed", "inspect-rollouts"):
        assert word in done.stdout, f"the summary does not show {word!r}:\n{done.stdout}"
