"""A small valid configuration, and a real launcher in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from grpo_async.config import ExperimentConfig
from grpo_async.launch.plan import ProcessPlan, own_urls, plan_processes
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.machine import Machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice
from tests.support.configs import merged
from tests.support.waiting import eventually, is_alive

REPOSITORY = Path(__file__).parents[2]
EMBEDDED = EngineChoice(engine="embedded", reason="a test says so")
EXTERNAL = EngineChoice(engine="external", reason="a test says so")
VLLM_ON_CPU = EngineChoice(engine="vllm", reason="a test says so")
VLLM_ON_GPU = EngineChoice(engine="vllm", reason="a test says so", on_gpu=True)
START_S = 60.0  # the machine may be busy; a test fails at the end of it, it does not wait for it


def make_config(folder: Path, **sections: Any) -> ExperimentConfig:
    """A configuration whose files exist below `folder`; the model is no real one, the launcher does not load it."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    data = folder / "train.jsonl"
    data.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 2", "answer": "3"}\n')
    base: dict[str, Any] = {
        "run": {"name": "test", "dir": str(folder / "runs")},
        "model": {"path": str(model)},
        "data": {"train": {"type": "jsonl", "path": str(data)}},
        "rewards": [{"function": "grpo_async.rewards.text:exact_match"}],
        "inference": {"engine": "embedded"},
        "training": {"max_steps": 2},
        "record": {"report": False},
    }
    return ExperimentConfig.model_validate(merged(base, sections))


def make_plan(config: ExperimentConfig, machine: Machine, engine: EngineChoice) -> ProcessPlan:
    run_dir = RunDir(Path("/runs/x"))
    assignment = Assignment(
        run_dir=run_dir,
        attempt_dir=run_dir.attempt(1),
        private_dir=Path("/private"),
        server_urls=own_urls(config, config.inference.host, range(4711, 4711 + config.inference.replicas)),
    )
    return plan_processes(config, engine=engine, assignment=assignment, machine=machine, token="secret")


class LauncherProcess:
    """`launch` in a process of its own, with stand-ins; killed at the end of the `with` block, with all that it started."""

    def __init__(
        self,
        folder: Path,
        *,
        trainer: str,
        server: str = "serve",
        torchrun: bool = False,
        stop_timeout_s: float = 60.0,
        stdout: int | None = None,
        **more: Any,
    ) -> None:
        """`more`: see tests.launch.driver. `stdout`: a descriptor to write to, in place of `output`."""
        self.folder = folder
        options = {**more, "folder": str(folder), "trainer": trainer, "server": server, "torchrun": torchrun}
        options["stop_timeout_s"] = stop_timeout_s
        # short, because a unix socket's path is limited; a killed launcher cannot remove its private folder itself
        self._temporary = tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp")
        self.temporary = self._temporary.name
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.launch.driver", json.dumps(options)],
                cwd=REPOSITORY,
                env={**os.environ, "TMPDIR": self._temporary.name},
                stdout=output if stdout is None else stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed until now."""
        return (self.folder / "output").read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *self.pids().values()]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(START_S)
        self._temporary.cleanup()

    def pids(self) -> dict[str, int]:
        """The stand-ins that have started: server (or server0, server1), rank0, rank1, helpers."""
        return {path.stem: int(path.read_text()) for path in self.folder.glob("*.pid")}

    def wait_for_line(self, text: str) -> None:
        """Until the output contains `text`."""
        eventually(lambda: text in self.output or self.process.poll() is not None, START_S)
        assert text in self.output, f"the launcher did not say {text!r}:\n{self.output}"

    def wait_for_processes(self, *names: str) -> None:
        """Until the stand-ins `names` have started."""
        assert eventually(lambda: set(names) <= self.pids().keys(), START_S), f"{names}: only {self.pids()}"

    def status(self) -> dict[str, Any]:
        """What status.json says; empty before there is one."""
        path = self.folder / "runs" / "test" / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def end(self) -> int:
        """Wait for the launcher; returns the exit code."""
        return self.process.wait(START_S)

    def left(self) -> dict[str, int]:
        """Stand-ins that still run."""
        return {name: pid for name, pid in self.pids().items() if is_alive(pid)}
