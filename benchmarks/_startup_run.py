"""One `train` to its first step, and where its seconds went: from its own JSON lines, timeline, server log and process table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LOOK_S = 0.05
"""How exact seconds are that are read from the server's log; those of processes are exact to 0.01, of the timeline to 0.001."""
_END_TIMEOUT_S = 60.0

# first line of the server's log that matches -> what has been reached then
SERVER_MARKS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "embedded": (
        ("libraries imported", r"imported torch and transformers"),
        ("model loaded", r"loaded the model"),
        ("engine checked", r"checked the engine against"),
        ("serving", r"^serving "),
    ),
    "vllm": (
        ("libraries of the API process imported", r"\(APIServer"),
        ("libraries of the engine's core imported", r"\(EngineCore"),
        ("model begins to load", r"Starting to load model"),
        ("model loaded", r"Loading weights took|Model loading took"),
        ("cache made, warm", r"init engine .* took|Warming up done"),
        ("serving", r"Application startup complete"),
    ),
}
_PROCESSES = (
    ("torchrun", "grpo_async.launcher.torchrun"),
    ("rank", "grpo_async.trainer.main"),
    ("server", "serve-"),
    ("server", "grpo_async.servers.vllm"),
)


@dataclass(slots=True)
class FirstStep:
    """Seconds since the start of the command. `stages` follow each other on the trainer's side and sum up to `first_step_s`;
    `server` are moments of the server, which starts beside it; `cpu_s` is what all processes computed until training began."""

    first_step_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    server: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    num_processes: int = 0


def first_step(
    root: Path,
    config: Path,
    folder: Path,
    *,
    engine: str,
    seed: int,
    timeout_s: float,
    overrides: Sequence[str] = (),
) -> FirstStep:
    """Run `grpo-async train` of the checkout `root` with `engine` for one step, below `folder`.

    Raises:
        RuntimeError: it failed, or took longer than `timeout_s`; the message has its last words.
    """
    settings = {
        "run.dir": str(folder),
        "run.name": "first-step",
        "run.seed": str(seed),
        "training.max_steps": "1",
        "optimizer.warmup_steps": "0",
        "evaluation": "null",
    }
    command = [sys.executable, "-m", "grpo_async", "train", str(config), "--json-logs"]
    for setting in (*(f"{key}={value}" for key, value in settings.items()), *overrides):
        command += ["--set", setting]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    began = time.time()
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False
    )
    watch = Watch(process, folder / "first-step", SERVER_MARKS[engine], began)
    try:
        watch.until_it_ends(timeout_s)
    finally:
        if process.poll() is None:
            process.kill()  # its children end with it
        process.wait(timeout=_END_TIMEOUT_S)
    if process.returncode != 0 or watch.first_step_at is None:
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}:\n{watch.last_words()}")
    return watch.result()


class Watch:
    """Reads what a `train` writes while it goes, and makes stages of it in the end.

    Args:
        run: its run directory.
        marks: see SERVER_MARKS.
        began: unix seconds, when the command was started.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], run: Path, marks: Sequence[tuple[str, str]], began: float
    ) -> None:
        self._process = process
        self._run = run
        self._marks = [(name, re.compile(pattern)) for name, pattern in marks]
        self._began = began
        self._log_offset = 0
        self._log_rest = b""
        self._lines: list[str] = []
        self.starts: dict[str, float] = {}  # kind of process -> seconds after the launcher's own start
        self._server: dict[str, float] = {}
        self._cpu_s = 0.0
        self._num_processes = 0
        self.first_step_at: float | None = None

    def until_it_ends(self, timeout_s: float) -> None:
        """Read what the command says until it has closed both pipes."""
        ends_at = time.monotonic() + timeout_s
        pipes = (self._process.stdout, self._process.stderr)
        rest = dict.fromkeys(pipes, b"")
        with selectors.DefaultSelector() as selector:
            for pipe in pipes:
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                if time.monotonic() > ends_at:
                    self._lines.append(f"no end within {timeout_s:g} s")
                    return
                for key, _ in selector.select(timeout=LOOK_S):
                    data = os.read(key.fd, 1 << 16)
                    *lines, rest[key.fileobj] = (rest[key.fileobj] + data).split(b"\n")  # type: ignore[index]
                    for line in lines:
                        self._take(line.decode(errors="replace"))
                    if not data:
                        selector.unregister(key.fileobj)
                self._read_server_log()

    def _take(self, line: str) -> None:
        self._lines.append(line)
        event: dict[str, Any] = {}
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
        if event.get("event") == "phase" and event.get("name") == "training":
            self._look_at_processes()
        if event.get("event") == "step" and self.first_step_at is None:
            self.first_step_at = float(event["time"])

    def _look_at_processes(self) -> None:
        """Of the whole tree: when each kind started, beside the launcher's own start, and what it has computed."""
        launcher = psutil.Process(self._process.pid)
        origin = launcher.create_time()  # its clock may be off by a second; differences are not
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                line, started, used = " ".join(process.cmdline()), process.create_time() - origin, process.cpu_times()
                self._cpu_s += used.user + used.system
                self._num_processes += 1
                kind = next((kind for kind, words in _PROCESSES if words in line), None)
                if kind is not None and process.pid != launcher.pid:
                    self.starts[kind] = min(self.starts.get(kind, started), started)

    def _read_server_log(self) -> None:
        log = self._run / "logs" / "attempt_1" / "server.log"
        with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(self._log_offset)
            data = file.read()
            self._log_offset += len(data)
            *lines, self._log_rest = (self._log_rest + data).split(b"\n")
            for line in lines:
                for name, pattern in self._marks:
                    if name not in self._server and pattern.search(line.decode(errors="replace")):
                        self._server[name] = time.time() - self._began

    def last_words(self) -> str:
        """The last lines of everything that speaks."""
        words = [*self._lines[-8:]]
        for name in ("trainer.log", "server.log"):
            with contextlib.suppress(FileNotFoundError):
                text = (self._run / "logs" / "attempt_1" / name).read_text(encoding="utf-8", errors="replace")
                words += [f"--- {name}", *text.splitlines()[-8:]]
        return "\n".join(words)

    def result(self) -> FirstStep:
        """The stages, from the moments at which each ends."""
        assert self.first_step_at is not None
        events = [json.loads(line) for line in (self._run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        ends = {(event["lane"], event["name"]): event["end"] for event in reversed(events)}  # the first of each
        starts = {(event["lane"], event["name"]): event["start"] for event in reversed(events)}
        moments: list[tuple[str, float | None]] = [
            ("launcher: configuration, checks, plan", self._moment_of(("torchrun", "rank"))),
            ("torchrun", self._moment_of(("rank",)) if "torchrun" in self.starts else None),
            ("rank: Python, configuration", starts.get(("run", "attempt"))),
            ("rank: imports", ends.get(("run", "import"))),
            ("rank: meeting, tokenizer", ends.get(("run", "load the tokenizer"))),
            ("rank: model, optimizer", ends.get(("run", "loading the model"))),
            ("rank: data, rewards, rollout side", starts.get(("run", "waiting for the server"))),
            ("waiting for the server", ends.get(("run", "waiting for the server"))),
            ("first push", ends.get(("run", "pushing the first weights"))),
            ("preflight", ends.get(("run", "checking trainer and servers against each other"))),
            ("first rollouts", ends.get(("trainer", "wait for samples"))),
            ("first step", self.first_step_at),
        ]
        stages, before = {}, self._began
        for name, at in moments:
            if at is not None:
                stages[name] = at - before
                before = at
        server = {"process started": self.starts["server"]} if "server" in self.starts else {}
        return FirstStep(
            first_step_s=self.first_step_at - self._began,
            stages=stages,
            server={**server, **self._server},
            cpu_s=self._cpu_s,
            num_processes=self._num_processes,
        )

    def _moment_of(self, kinds: Sequence[str]) -> float | None:
        """When the first process of these kinds started."""
        found = [self.starts[kind] for kind in kinds if kind in self.starts]
        return self._began + min(found) if found else None
