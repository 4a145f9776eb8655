"""Starts the real command line as a user would, and looks at the processes and files it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

REPOSITORY = Path(__file__).parents[2]
_MARK = "GRPO_ASYNC_TEST_MARK"


@dataclass
class Run:
    """One run directory and the commands that work on it. Every process started here carries a mark in its environment."""

    config: Path
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, *arguments: str, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "grpo_async", "train", str(self.config), *arguments],
            cwd=REPOSITORY,
            env={**environment, _MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(
        self, *arguments: str, timeout_s: float = 300.0, environment: Mapping[str, str] = os.environ
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, environment=environment)
        return finish(process, timeout_s=timeout_s)

    def complete(self, *arguments: str, timeout_s: float = 300.0) -> tuple[dict[str, Any], str]:
        """A run that is to end well: exit code 0, no process left, the ledger closed. Its summary and what was printed."""
        done = self.train(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, done.stdout[-3000:] + self.logs()[-3000:]
        self.assert_nothing_is_left()
        summary = self.summary()
        assert summary["ledger_closed"]
        return summary, done.stdout

    def processes(self, part_of_command: str = "") -> list[psutil.Process]:
        """Living processes of this run whose command line contains a word."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
                if is_ours and part_of_command in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # ended while we looked, or not ours to look at
        return found

    def assert_nothing_is_left(self, *, within_s: float = 10.0) -> None:
        wait_for(lambda: not self.processes(), what="every process of the run to end", timeout_s=within_s)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "logs").glob("attempt_*/*.log")))

    def wait_for_step(self, step: int, process: subprocess.Popen[str], *, timeout_s: float = 120.0) -> None:
        def reached() -> bool:
            assert process.poll() is None, f"the run ended early:\n{process.communicate()[0]}\n{self.logs()[-3000:]}"
            return len(self.metrics()) >= step

        wait_for(reached, what=f"step {step}", timeout_s=timeout_s)


def run_command(*arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """`grpo-async` with these arguments, stdout and stderr apart."""
    return subprocess.run(
        [sys.executable, "-m", "grpo_async", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def status_of(folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and content of `grpo-async status --json`."""
    done = run_command("status", str(folder), "--json", timeout_s=60.0)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def finish(process: subprocess.Popen[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s:.0f} s:\n{output[-3000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def wait_for(condition: Callable[[], bool], *, what: str, timeout_s: float, every_s: float = 0.05) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(every_s)


def make_run(folder: Path, base: str, overrides: Sequence[str] = (), *, name: str = "run") -> Run:
    """A run of a shipped config with overrides, written as a config file that extends it."""
    content: dict[str, Any] = {"extends": str(REPOSITORY / "configs" / base)}
    for override in [f"run.name={name}", f"run.dir={folder}", "record.report=false", *overrides]:
        path, _, value = override.partition("=")
        *sections, last = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = yaml.safe_load(value)
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(content))
    return Run(config=config, folder=folder / name)
