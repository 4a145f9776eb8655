"""What is known of a run while it goes on. Lines, dashboard, events and status.json come from it.

Unknown metrics are ignored and missing ones left out, so a trainer may report more or less.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

import psutil

from grpo_async.display.render import means
from grpo_async.findings import Diagnosis, MetricRow
from grpo_async.run_directory import RunDir
from grpo_async.utils.run_state import RUNNING
from grpo_async.utils.safe_text import one_line, tail
from grpo_async.utils.text import clipped, duration, finite

_AVERAGED_STEPS = 5
_TIMED_STEPS = 10
_CURVE_POINTS = 120
_MAX_MESSAGES = 500
_MAX_DETAIL = 160
STATUS_VERSION = 1
"""Of the layout of status.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """A note or a warning, on one line, and when (time.time())."""

    at: float
    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt of a step and completions of it with their rewards: the best and the worst, or one
    where these are equal."""

    step: int
    prompt: str
    completions: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Example:
        """Make one of a message; text is made safe for a terminal."""
        completions = [
            {"reward": float(each["reward"]), "text": one_line(str(each["text"]))} for each in content["completions"]
        ]
        prompt = one_line(str(content["prompt"]))
        return cls(step=int(content["step"]), prompt=prompt, completions=completions)


@dataclass(slots=True)
class Progress:
    """Mutable state of one run. Hold `lock` to change it, or to read fields that belong together."""

    max_steps: int
    """0: not known; with `training.epochs` the first step tells it."""
    step: int = 0
    phase: str = "starting"
    phase_since: float = field(default_factory=time.time)
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)
    """Of each step that had one."""
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED_STEPS))
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    servers: list[dict[str, Any]] = field(default_factory=list)
    messages: deque[RunMessage] = field(default_factory=lambda: deque(maxlen=_MAX_MESSAGES))
    diagnosis: Diagnosis | None = None
    example: Example | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def set_phase(self, name: str) -> None:
        """`name` may say how far it is after a colon: "evaluating: 3 of 8 prompts"."""
        name = one_line(name)
        if name.partition(":")[0] != self.phase.partition(":")[0]:
            self.phase_since = time.time()
        self.phase = name

    def add_step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        if step <= self.step:  # the ranks went on from an earlier checkpoint than was thought
            self.rewards = {known: reward for known, reward in self.rewards.items() if known < step}
        if self.diagnosis is not None and self.diagnosis.key == "no-steps":
            self.diagnosis = None  # of the time before this step
        self.step, self.max_steps, self.metrics = step, max_steps, dict(metrics)
        if (reward := finite(metrics.get("reward"))) is not None:
            self.rewards[step] = reward
        if (step_time := finite(metrics.get("step_time"))) is not None:
            self.step_times.append(step_time)

    def set_past(self, rows: Iterable[MetricRow]) -> None:
        """Take the rewards of earlier steps from metrics.jsonl. When a run is resumed, those after
        `step` stay in the file until the trainer is there."""
        self.rewards = {int(row["step"]): row["reward"] for row in rows if row["step"] <= self.step and "reward" in row}

    @property
    def last_rewards(self) -> list[float]:
        """Those of the last five steps, the newest at the end."""
        return list(islice(reversed(self.rewards.values()), _AVERAGED_STEPS))[::-1]

    def add_message(self, text: str, *, is_warning: bool = False) -> None:
        message = RunMessage(at=time.time(), text=one_line(text), is_warning=is_warning)
        self.messages.append(message)

    def set_servers(self, servers: Iterable[Mapping[str, Any]]) -> None:
        """Take what the trainer reports of every server; texts are made safe for a terminal."""
        safe = [
            {name: one_line(value) if isinstance(value, str) else value for name, value in each.items()}
            for each in servers
        ]
        self.servers = sorted(safe, key=lambda server: int(server.get("index", 0)))

    @property
    def step_s(self) -> float | None:
        """Mean time of the last ten steps."""
        return fmean(self.step_times) if self.step_times else None

    @property
    def eta_s(self) -> float | None:
        step_s = self.step_s
        return None if step_s is None else (self.max_steps - self.step) * step_s

    def as_dict(self) -> dict[str, Any]:
        """Return the part of status.json that says how far the run is; what is not known yet is
        null. Hold `lock`."""
        rewards = self.last_rewards
        warning = next((each for each in reversed(self.messages) if each.is_warning), None)
        note = next((each for each in reversed(self.messages) if not each.is_warning), None)
        return {
            "phase": self.phase,  # what it is doing, in words
            "phase_since": self.phase_since,
            "step": self.step,  # finished optimizer steps
            "max_steps": self.max_steps or None,
            "eta_s": self.eta_s,  # by the last ten steps
            "reward": {  # mean of all groups of the last step; of 5 steps; of all steps, in at most 120 means
                "last": rewards[-1] if rewards else None,
                "average": fmean(rewards) if rewards else None,
                "curve": means(list(self.rewards.values()), _CURVE_POINTS),
            },
            "metrics": dict(self.metrics),  # of the newest step, as in metrics.jsonl
            "example": self.example and asdict(self.example),  # a good completion and a bad one
            "ledger": _ledger(self.metrics),  # groups and tokens by what became of them
            "servers": [dict(server) for server in self.servers],
            "evaluations": {when: dict(metrics) for when, metrics in self.evaluations.items()},
            "learning": self.diagnosis and self.diagnosis.as_dict(),  # when it was last looked at
            "last_warning": warning and {"at": warning.at, "text": warning.text},
            "last_note": note and {"at": note.at, "text": note.text},
        }


def checkpoint_of(run_dir: RunDir) -> dict[str, Any]:
    """Return the newest checkpoint on disk, when it was finished, and the step that is written."""
    step, at = max(run_dir.checkpoint_steps(), default=None), None
    if step is not None:
        try:
            at = run_dir.checkpoint(step).stat().st_mtime
        except FileNotFoundError:  # removed since the folder was listed
            step = None
    return {"step": step, "at": at, "writing": max(run_dir.unfinished_steps(), default=None)}


def _ledger(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """{"ledger/groups/trained": 3.0} -> {"groups": {"trained": 3}}."""
    ledger: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == "ledger" and isinstance(value, int | float):
            ledger.setdefault(parts[1], {})[parts[2]] = int(value)
    return ledger


class StatusContent:
    """The content of status.json, also for what a terminal shows; `about` is what never changes:
    attempt, engine, on_gpu, precision, purpose."""

    def __init__(self, run_dir: RunDir, progress: Progress, *, run_name: str, about: Mapping[str, Any]) -> None:
        self.run_dir = run_dir
        self.progress = progress
        self.result: tuple[str, int | None, str | None] = (RUNNING, None, None)
        """State, exit code and error."""
        self._fixed = {
            "version": STATUS_VERSION,  # of this layout
            "run": run_name,
            "directory": str(run_dir.root),
            "started_at": time.time(),  # of this attempt
            "host": platform.node(),  # of the launcher
            "pid": os.getpid(),
            "pid_started_at": psutil.Process().create_time(),  # pids are used again
            **about,
        }

    def content(self) -> dict[str, Any]:
        """Return what is known now. Times are seconds since 1970; what is not known is null."""
        checkpoint = checkpoint_of(self.run_dir)  # the disk may be slow: without the lock
        with self.progress.lock:
            progress, (state, exit_code, error) = self.progress.as_dict(), self.result
        is_running = state == RUNNING
        return {
            **self._fixed,
            "state": state,  # running, finished, stopped (by a signal, after a checkpoint), failed
            "updated_at": time.time(),
            "exit_code": exit_code,
            "error": error,  # why it failed
            **progress,
            "eta_s": progress["eta_s"] if is_running else None,
            "detail": self._starting(progress) if is_running else None,
            "checkpoint": checkpoint,
        }

    def now(self) -> str:
        """Say in one line what the run is doing, and for how long."""
        content = self.content()
        took = duration(max(0, round(time.time() - content["phase_since"])))
        detail = f"; {content['detail']}" if content["detail"] else ""
        return f"{content['phase']} ({took}){detail}"

    def _starting(self, progress: Mapping[str, Any]) -> str | None:
        """The last line of a server's log, until one is up."""
        if progress["step"] or any(each.get("state") == "serving" for each in progress["servers"]):
            return None
        logs = sorted(self.run_dir.latest_logs.glob("server*.log"), key=lambda log: log.name)
        lines = [line for log in logs[:1] for line in tail(log, 1)]
        return f"{logs[0].name}: {clipped(one_line(lines[0]), _MAX_DETAIL)}" if lines else None
