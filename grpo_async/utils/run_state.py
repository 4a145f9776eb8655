"""Whether a run is alive: what its status.json says, held against the process that writes it. One set of words for all who show it.

A launcher that is killed leaves "running" behind; its process is looked for on this machine, and on another the age of the file
decides.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from grpo_async.utils.processes import is_running
from grpo_async.utils.text import duration, finite

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
"""What stands in status.json; stopped: by a signal, after a checkpoint."""

EVALUATED = "evaluated"
"""What stands in the summary.json of `grpo-async eval`, which has no status.json."""

KILLED, SILENT = "killed", "silent"
"""The file says running, and that cannot be: its launcher no longer runs; or it is on another machine and has written
nothing for SILENT_S."""

UNFINISHED = "unfinished"
"""There is neither status.json nor summary.json: the run has not ended properly, and may still be running."""

LEVELS: Mapping[str, Literal["good", "info", "warning", "bad"]] = {
    RUNNING: "info",
    FINISHED: "good",
    EVALUATED: "good",
    STOPPED: "warning",
    FAILED: "bad",
    KILLED: "bad",
    SILENT: "warning",
    UNFINISHED: "warning",
}
"""Every state, and how good it is."""

SILENT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`state` is one of LEVELS (or another word that the file has). `why`: why the file's own state is not believed, "" if it is;
    it quotes the file, so it is shown as any text of others is."""

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
    started_at = finite(status.get("pid_started_at"))
    if type(pid) is int and 0 < pid < 2**31 and started_at is not None and is_running(pid, started_at):
        return RunState(state=RUNNING)
    when = "" if age is None else f", {age} ago or less"
    return RunState(state=KILLED, why=f"its launcher (pid {pid}) is no longer running: it was killed{when}")
