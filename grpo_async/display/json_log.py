"""`--json-logs`: everything that a run says, one JSON object per line on stdout, and nothing else there."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from grpo_async.checks.report import Check
from grpo_async.display.display import ProgressDisplay
from grpo_async.display.progress import Progress
from grpo_async.findings import Finding, Verdict

EVENTS = (
    "start",
    "phase",
    "preflight",
    "step",
    "evaluation",
    "server",
    "servers",
    "advice",
    "learning",
    "note",
    "warning",
    "error",
    "end",
)
"""All of them; what each has stands in the help of the commands (cli.options)."""


class JsonLog:
    """Writes events to `file`, flushed by line; any thread may."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout

    def write(self, event: str, **fields: Any) -> None:
        """Numbers that JSON does not have become null."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **finite(fields)}, default=str)
        self._file.write(line + "\n")
        self._file.flush()


def finite(value: Any) -> Any:
    """`value` with null in place of NaN and the infinities, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


class JsonDisplay(ProgressDisplay):
    """Every call is an event."""

    def __init__(self, log: JsonLog, *, max_steps: int) -> None:
        super().__init__(Progress(max_steps=max_steps))
        self._log = log
        self._states: list[tuple[Any, ...]] = []

    def phase(self, name: str) -> None:
        self._log.write("phase", name=name)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        super().step(step, max_steps, metrics)
        self._log.write("step", step=step, max_steps=max_steps, eta_s=self.progress.seconds_left, metrics=dict(metrics))

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        self._log.write("evaluation", when=when, metrics=dict(metrics))

    def preflight(self, checks: Sequence[Check]) -> None:
        self._log.write("preflight", checks=[asdict(check) for check in checks])

    def server(self, name: str, trouble: str | None) -> None:
        self._log.write("server", name=name, trouble=trouble)

    def servers(self, servers: Sequence[Mapping[str, Any]]) -> None:
        states = [(server.get("index"), server.get("state"), server.get("restarts")) for server in servers]
        if states != self._states:  # the load comes with every step
            self._states = states
            self._log.write("servers", servers=[dict(server) for server in servers])

    def advice(self, step: int, advice: Finding) -> None:
        self._log.write("advice", step=step, **advice.as_advice())

    def learning(self, verdict: Verdict) -> None:
        self._log.write("learning", **verdict.as_dict())

    def note(self, text: str) -> None:
        self._log.write("note", text=text)

    def warning(self, text: str) -> None:
        self._log.write("warning", text=text)
