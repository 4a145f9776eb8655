"""`--json-logs`: everything that a run says, one JSON object per line on stdout, and nothing else there."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from grpo_async.display.display import View

EVENTS = (
    "start", "phase", "preflight", "step", "evaluation", "server", "servers", "advice", "learning", "note", "warning", "error",
    "end",
)  # fmt: skip
"""All of them; what each has is in the help of the commands (cli.options)."""


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


class JsonView(View):
    """Every event is a line; the servers are one when a state changes, not with every figure of their load."""

    def __init__(self, log: JsonLog) -> None:
        self._log = log
        self._states: list[tuple[Any, ...]] = []

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "servers":
            states = [
                (server.get("index"), server.get("state"), server.get("restarts")) for server in fields["servers"]
            ]
            if states == self._states:
                return
            self._states = states
        if event == "preflight":
            fields = {"checks": [asdict(check) for check in fields["checks"]]}
        self._log.write(event, **fields)
