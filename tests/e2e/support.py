"""Starts the real command line as a user would, and looks at the processes and files it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.support.waiting import eventually

REPOSITORY = Path(__file__).parents[2]
_MARK = "GRPO_ASYNC_TEST_MARK"
SERVER_COMMANDS = ("serve-embedded", "vllm.entrypoints.")
RECOVERY_S = 300.0  # a hang is noticed, and a vLLM starts on a busy machine

SMALL = (
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "optimizer.warmup_steps=0",
)


@dataclass
class Run:
    """One run directory and the commands that work on it. Every process started here carries a mark in its environment."""

    config: Path
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        """For processes that belong to this run."""
        return {**os.environ, _MARK: self.mark}

    def start(
        self, *arguments: str, command: str = "train", environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "grpo_async", command, str(self.config), *arguments],
            cwd=REPOSITORY,
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], code: int = 0, *, timeout_s: float = 300.0) -> str:
        """The run is to end with this exit code, and leave no process. What it printed."""
        done = finish(process, timeout_s=timeout_s)
        assert done.returncode == code, done.stdout[-3000:] + self.logs()[-3000:]
        self.assert_nothing_is_left()
        return done.stdout

    def complete(
        self, *arguments: str, timeout_s: float = 300.0, environment: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Any], str]:
        """A run that is to end well: exit code 0, no process left, the ledger balanced. Its summary and what was printed."""
        printed = self.end(self.start(*arguments, environment=environment), timeout_s=timeout_s)
        summary = self.summary()
        assert summary["ledger_closed"]
        assert [line["step"] for line in self.metrics()] == list(range(1, summary["steps"] + 1))
        return summary, printed

    def fail(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """A run that is to end with exit code 1 and no process left. What it printed."""
        return self.end(self.start(*arguments), 1, timeout_s=timeout_s)

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

    def ranks(self) -> dict[int, psutil.Process]:
        """The trainer's processes by their rank."""
        found = self.processes("grpo_async.trainer.main")  # torchrun, too, which has no rank
        return {int(each.environ()["RANK"]): each for each in found if "RANK" in each.environ()}

    def server(self) -> psutil.Process:
        """The one API process of the server that runs now."""
        found = {each.pid: each for word in SERVER_COMMANDS for each in self.processes(word)}
        (server,) = [each for each in found.values() if each.ppid() not in found]
        return server

    def kill_server_in_a_push(self) -> None:
        """Between pause and resume. It is asked as its user may ask it: address from plan.txt, token from the run's file."""
        server, token = self.server(), (self.folder / "token").read_text().strip()
        url = re.findall(r"http://127\.0\.0\.1:\d+", (self.folder / "plan.txt").read_text())[0]
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=12.0) as client:
            assert eventually(lambda: client.get("/is_paused").json()["is_paused"], RECOVERY_S, every_s=0.0), "a push"
            server.kill()

    def kill_everything(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL to every process of the run, the launcher first, so that nobody has time to tidy up."""
        process.kill()
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate(timeout=30.0)
        self.assert_nothing_is_left(within_s=30.0)

    def assert_nothing_is_left(self, *, within_s: float = 10.0) -> None:
        assert eventually(lambda: not self.processes(), within_s, every_s=0.05), "every process of the run to end"

    def metrics(self) -> list[dict[str, Any]]:
        return _json_lines(self.folder / "metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        return _json_lines(self.folder / "evaluations.jsonl")

    def checkpoints(self) -> list[int]:
        """Steps of the whole ones."""
        return sorted(int(path.name.removeprefix("step_")) for path in (self.folder / "checkpoints").glob("step_*"))

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "logs").glob("attempt_*/*.log")))

    def wait_for(
        self, condition: Callable[[], bool], process: subprocess.Popen[str], *, what: str, timeout_s: float = 120.0
    ) -> None:
        """Until `condition` holds; fails when `process`, the run, ends."""

        def reached() -> bool:
            assert process.poll() is None, f"the run ended early:\n{process.communicate()[0]}\n{self.logs()[-3000:]}"
            return condition()

        assert eventually(reached, timeout_s, every_s=0.05), f"waited {timeout_s:.0f} s for {what}"

    def wait_for_servers(
        self, process: subprocess.Popen[str], *, serving: int = 1, restarts: int = 0, timeout_s: float = RECOVERY_S
    ) -> None:
        """Until so many servers serve after so many restarts, by the newest line of the metrics."""

        def reached() -> bool:
            newest = self.metrics()[-1:]
            return any(line["servers/restarts"] >= restarts and line["servers/serving"] == serving for line in newest)

        what = f"{serving} to serve after {restarts} restarts"
        self.wait_for(reached, process, what=what, timeout_s=timeout_s)

    def wait_for_step(self, step: int, process: subprocess.Popen[str], *, timeout_s: float = 120.0) -> None:
        self.wait_for(lambda: len(self.metrics()) >= step, process, what=f"step {step}", timeout_s=timeout_s)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be written to, or not be there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def assert_ledger_balances_at_every_step(lines: Sequence[Mapping[str, Any]]) -> None:
    """started = trained + filtered + stale + failed + cancelled + queued + in flight, in groups and in tokens."""
    for line in lines:
        for kind in ("groups", "tokens"):
            counts = {k.rpartition("/")[2]: v for k, v in line.items() if k.startswith(f"ledger/{kind}/")}
            assert counts.pop("started") == sum(counts.values()), line


def assert_on_policy(lines: Sequence[Mapping[str, Any]]) -> None:
    """With a learning rate at which stale weights would show: at staleness 0 the ratio of every trained token is 1 within 1e-3
    (fp32 on both sides), although the weights moved between the steps."""
    for line in lines:
        assert line["async/staleness_max"] == 0
        assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-3)
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-3)


def run_command(
    *arguments: str, timeout_s: float = 300.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`grpo-async` with these arguments, stdout and stderr apart."""
    return subprocess.run(
        [sys.executable, "-m", "grpo_async", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def status_of(folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and content of `grpo-async status --json`."""
    done = run_command("status", str(folder), "--json", timeout_s=60.0)
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def rows_of(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What `inspect-rollouts --json` prints."""
    shown = run_command("inspect-rollouts", str(folder), "--json", *options, timeout_s=60.0)
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def finish(process: subprocess.Popen[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s:.0f} s:\n{output[-3000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@contextlib.contextmanager
def serving_alone(config: Path, port: int, token: str) -> Iterator[subprocess.Popen[bytes]]:
    """`serve-embedded`, as started by hand; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_async", "serve-embedded", str(config), "--port", str(port)],
        cwd=REPOSITORY,
        env={**os.environ, "GRPO_ASYNC_TOKEN": token},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=30.0)


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


def rewards(function: str, **more: str) -> str:
    """An override: this function of tests.e2e is the only reward."""
    section = {"function": f"tests.e2e.{function}", **more}
    return f"rewards=[{json.dumps(section)}]"
