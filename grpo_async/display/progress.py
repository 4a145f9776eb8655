"""What is known of a run while it goes on: the content of status.json, as its events make it.

Unknown metrics are ignored and missing ones left out, so a trainer may report more or less.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import psutil

from grpo_async.display.render import evaluation_line, failed_checks, means
from grpo_async.findings.history import read_metrics
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


class Progress:
    """The state of one run. Any thread may call.

    Args:
        max_steps: 0: not known; with `training.epochs` the first step tells it.
        resume_step: steps up to it are read from metrics.jsonl, for averages.
        about: what never changes: attempt, engine, on_gpu, precision, purpose.

    Attributes:
        messages: notes and warnings, as they are printed.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        run_name: str,
        max_steps: int,
        resume_step: int | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.messages: deque[str] = deque(maxlen=_MAX_MESSAGES)
        self._lock = threading.RLock()
        self._rewards: dict[int, float] = {}  # of each step that had one
        self._step_times: deque[float] = deque(maxlen=_TIMED_STEPS)
        now = time.time()
        self._content: dict[str, Any] = {
            "version": STATUS_VERSION,
            "run": run_name,
            "directory": str(run_dir.root),
            "started_at": now,  # of this attempt
            "host": platform.node(),  # of the launcher
            "pid": os.getpid(),
            "pid_started_at": psutil.Process().create_time(),  # pids are used again
            **(about or {}),
            "state": RUNNING,  # running, finished, stopped (by a signal, after a checkpoint), failed
            "exit_code": None,
            "error": None,  # why it failed
            "phase": "starting",  # what it is doing, in words
            "phase_since": now,
            "step": resume_step or 0,  # finished optimizer steps
            "max_steps": max_steps or None,
            "eta_s": None,  # by the last ten steps
            "reward": {},  # mean of all groups of the last step; of 5 steps; of all steps, in at most 120 means
            "metrics": {},  # of the newest step, as in metrics.jsonl
            "ledger": {},  # groups and tokens by what became of them
            "example": None,  # a good completion and a bad one
            "servers": [],
            "evaluations": {},
            "learning": None,  # when it was last looked at
            "last_warning": None,
            "last_note": None,
        }
        if resume_step is not None:  # those after it stay in the file until the trainer is there
            past = [row for row in read_metrics(run_dir, []) if row["step"] <= resume_step and "reward" in row]
            self._rewards = {int(row["step"]): row["reward"] for row in past}
        self._set_reward()

    def add(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take an event, as `events.JSON_EVENTS` lists them. Texts are made safe for a terminal."""
        with self._lock:
            content = self._content
            match event:
                case "phase":
                    name = one_line(fields["name"])
                    if _topic(name) != _topic(content["phase"]):
                        content["phase_since"] = time.time()
                    content["phase"] = name
                case "step":
                    self._add_step(fields["step"], fields["max_steps"], fields["metrics"])
                case "evaluation":
                    content["evaluations"] = {**content["evaluations"], fields["when"]: dict(fields["metrics"])}
                    self._say("note", evaluation_line(fields["when"], fields["metrics"]))
                case "preflight":
                    self._say("note", f"preflight: {fields['counts']}")
                    for line in failed_checks(fields["checks"]):
                        self._say("warning", line)
                case "servers":
                    servers = [{name: _safe(value) for name, value in each.items()} for each in fields["servers"]]
                    content["servers"] = sorted(servers, key=lambda server: int(server.get("index", 0)))
                case "example":
                    texts = [{**each, "text": one_line(str(each["text"]))} for each in fields["completions"]]
                    content["example"] = {**fields, "prompt": one_line(str(fields["prompt"])), "completions": texts}
                case "learning":
                    content["learning"] = dict(fields)
                case "note" | "warning":
                    self._say(event, fields["text"])

    def end(self, state: str, *, exit_code: int, error: str | None) -> None:
        """Say how the run went; the first call wins."""
        with self._lock:
            if self._content["state"] == RUNNING:
                self._content |= {"state": state, "exit_code": exit_code, "error": error, "eta_s": None}

    @property
    def step_s(self) -> float | None:
        """Mean time of the last ten steps."""
        with self._lock:
            return fmean(self._step_times) if self._step_times else None

    @property
    def eta_s(self) -> float | None:
        content: Mapping[str, Any] = self._content
        return content["eta_s"]  # type: ignore[no-any-return]

    @property
    def reward_change(self) -> float | None:
        """The newest reward minus the mean of up to four before it: 0.4, 0.6, 0.7 -> 0.7 - 0.5 = +0.2."""
        with self._lock:
            *before, last = list(self._rewards.values())[-_AVERAGED_STEPS:] or [0.0]
            return last - fmean(before) if before else None

    def content(self) -> dict[str, Any]:
        """Return what is known now. Times are seconds since 1970; what is not known is null."""
        checkpoint = _checkpoint_of(self.run_dir)  # the disk may be slow: without the lock
        with self._lock:
            content = dict(self._content)
        detail = self._starting(content) if content["state"] == RUNNING else None
        return {**content, "updated_at": time.time(), "detail": detail, "checkpoint": checkpoint}

    def now(self) -> str:
        """Say in one line what the run is doing, and for how long."""
        content = self.content()
        took = duration(max(0, round(time.time() - content["phase_since"])))
        detail = f"; {content['detail']}" if content["detail"] else ""
        return f"{content['phase']} ({took}){detail}"

    def _add_step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        content = self._content
        if step <= content["step"]:  # the ranks went on from an earlier checkpoint than was thought
            self._rewards = {known: reward for known, reward in self._rewards.items() if known < step}
        if (content["learning"] or {}).get("key") == "no-steps":
            content["learning"] = None  # of the time before this step
        if (reward := finite(metrics.get("reward"))) is not None:
            self._rewards[step] = reward
        if (step_time := finite(metrics.get("step_time"))) is not None:
            self._step_times.append(step_time)
        content |= {"step": step, "max_steps": max_steps or None, "metrics": dict(metrics), "ledger": _ledger(metrics)}
        content["eta_s"] = None if self.step_s is None else (max_steps - step) * self.step_s
        self._set_reward()

    def _set_reward(self) -> None:
        rewards = list(self._rewards.values())
        self._content["reward"] = {
            "last": rewards[-1] if rewards else None,
            "average": fmean(rewards[-_AVERAGED_STEPS:]) if rewards else None,
            "curve": means(rewards, _CURVE_POINTS),
        }

    def _say(self, kind: str, text: str) -> None:
        text = one_line(text)
        self._content[f"last_{kind}"] = {"at": time.time(), "text": text}
        self.messages.append(f"warning: {text}" if kind == "warning" else text)

    def _starting(self, content: Mapping[str, Any]) -> str | None:
        """The last line of a server's log, until one is up."""
        if content["step"] or any(each.get("state") == "serving" for each in content["servers"]):
            return None
        logs = sorted(self.run_dir.latest_logs.glob("server*.log"), key=lambda log: log.name)
        lines = [line for log in logs[:1] for line in tail(log, 1)]
        return f"{logs[0].name}: {clipped(one_line(lines[0]), _MAX_DETAIL)}" if lines else None


def _topic(phase: str) -> str:
    """The phase without how far it is: "evaluating: 3 of 8 prompts" -> "evaluating"."""
    return phase.partition(":")[0]


def _safe(value: Any) -> Any:
    return one_line(value) if isinstance(value, str) else value


def _checkpoint_of(run_dir: RunDir) -> dict[str, Any]:
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
