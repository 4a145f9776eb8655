"""Whether a run is alive: what its status.json says, held against the process that writes it. One set of words for all who show it.

A launcher that is killed leaves "running" behind; its process is looked for on this machine, and on another the age of the file
decides.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil

from grpo_async.utils.text import duration, finite

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
"""What stands in status.json; stopped: by a signal, after a checkpoint."""

KILLED, SILENT = "killed", "silent"
"""The file says running, and that cannot be: its launcher is gone without a word; or it is on another machine and has written
nothing for SILENT_S."""

UNFINISHED = "unfinished"
"""There is neither status.json nor summary.json: the run has not come to its end, and nothing tells whether it still will."""

STATES = (RUNNING, FINISHED, STOPPED, FAILED, KILLED, SILENT, UNFINISHED)

SILENT_S = 60.0
_CLOCK_S = 2.0  # the start of a process is measured in ticks, and of a clock that may be set


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`state` is one of STATES (or another word that the file has). `why`: what speaks against the file, "" where nothing does; it
    quotes the file, so it is shown as any text of others is."""

    state: str
    why: str = ""


def state_of(
    status: Mapping[str, Any], summary: Mapping[str, Any] = MappingProxyType({}), *, now: float | None = None
) -> RunState:
    """The state of the run whose status.json holds `status`. Whatever stands in it, nothing is raised.

    Args:
        summary: content of its summary.json, which is written when a run comes to its end: it decides where there is no status.json
            (`status` is empty).
        now: seconds since 1970; default: the clock.
    """
    state = status.get("state") if status else summary.get("status", UNFINISHED)
    if state != RUNNING:
        return RunState(state=state if isinstance(state, str) else "?")
    written_at = finite(status.get("updated_at"))
    age_s = None if written_at is None else max(0.0, (time.time() if now is None else now) - written_at)
    age = None if age_s is None else duration(round(age_s))
    host = status.get("host")
    if host != platform.node():
        if age_s is not None and age_s <= SILENT_S:
            return RunState(state=RUNNING)
        silence = "does not say when it wrote" if age is None else f"has written nothing for {age}"
        return RunState(state=SILENT, why=f"its launcher, on {host}, {silence}")
    pid = status.get("pid")
    if _is_alive(pid, finite(status.get("pid_started_at"))):
        return RunState(state=RUNNING)
    when = "" if age is None else f", {age} ago or less"
    return RunState(state=KILLED, why=f"its launcher (pid {pid}) is gone without a word: it was killed{when}")


def _is_alive(pid: object, started_at: float | None) -> bool:
    """Whether process `pid` of this machine is alive, and is not a later one of the same number."""
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**31 or started_at is None:
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started_at) <= _CLOCK_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return os.path.exists(f"/proc/{pid}")
