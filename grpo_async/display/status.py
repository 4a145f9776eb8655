"""`grpo-async status`: what status.json says and whether the launcher still runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo_async.display import render
from grpo_async.display.progress import STATUS_VERSION
from grpo_async.display.summary import fact_rows
from grpo_async.errors import ConfigError, RunError
from grpo_async.findings import RunHistory, diagnose
from grpo_async.run_directory import RunDir
from grpo_async.utils.console import print_rows
from grpo_async.utils.files import read_object
from grpo_async.utils.run_state import FAILED, FINISHED, KILLED, LEVELS, RUNNING, SILENT, STOPPED, state_of
from grpo_async.utils.safe_text import one_line
from grpo_async.viewer.runs import runs_below

EXIT_CODES: Mapping[str, int] = {RUNNING: 0, FINISHED: 0, FAILED: 1, STOPPED: 3, KILLED: 4, SILENT: 4}
"""Exit codes of `grpo-async status`; 2 is a run that does not exist."""

_COLORS = {"good": "green", "info": "green", "warning": "yellow", "bad": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Content of status.json. `state` is that of the file, or where it says running and that cannot
    be: killed or silent, and `why` (see `run_state`)."""

    run_dir: RunDir
    state: str
    content: Mapping[str, Any]
    why: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]

    def as_json(self) -> dict[str, Any]:
        """Return the content with `state`, `why`, `learning` and `problems` (of the run's files) as
        they are now."""
        history = RunHistory.read(self.run_dir)
        now = {"learning": diagnose(history).as_dict(), "problems": list(history.problems)}
        return {**self.content, "state": self.state, "why": self.why or None, **now}


def newest_run(runs: Path) -> RunDir:
    """Return the run directory below `runs` that was updated last."""
    written = [run for run in runs_below(runs) if run.status.exists()]
    if not written:
        raise ConfigError(
            f"there is no run with a status in {runs}; name a run directory, or start one: grpo-async train CONFIG"
        )
    return written[0]


def read_status(run_dir: RunDir, *, now: float | None = None) -> RunStatus:
    """Read status.json."""
    if not run_dir.status.exists():
        raise ConfigError(
            f"{run_dir.root} has no status.json: no run was started there, or an older version of grpo-async wrote it"
        )
    problems: list[str] = []
    content = read_object(run_dir.status, problems)
    if content.get("version") != STATUS_VERSION or content.get("state") not in EXIT_CODES:
        why = f": {problems[0]}" if problems else ""
        raise RunError(f"{run_dir.status} is not a status of this version (layout {STATUS_VERSION}){why}")
    found = state_of(content, now=now)
    return RunStatus(state=found.state, content=content, why=found.why, run_dir=run_dir)


def print_status(console: Console, status: RunStatus) -> None:
    """Print it for people. Escape sequences in the texts are removed."""
    rows = _rows(status, time.time())
    print_rows(console, [(name, Text(one_line(text), style=style)) for name, text, style in rows if text])


def _rows(status: RunStatus, now: float) -> Iterator[render.Row]:
    content = status.as_json()
    rows = list(render.run_rows(content, now))
    if status.state in (FINISHED, STOPPED):
        facts = [(name, text, "") for name, text in fact_rows(RunHistory.read(status.run_dir))]
        rows = [*(row for row in rows if row[0] in ("learning", "to do", "step")), *facts]
    yield from rows[:2]
    yield "state", render.join([status.state, status.why]), _COLORS[LEVELS[status.state]]
    yield "error", str(content.get("error") or ""), ""
    yield "run", f"{content.get('run')}  ({content.get('directory')})", ""
    yield from rows[2:]
    yield "precision", str(content.get("precision") or ""), ""
    yield "problem", "; ".join(content["problems"]), ""
    last = "ended" if status.state in (FINISHED, STOPPED, FAILED) else "last update"
    told = f"{last} {render.ago(float(content.get('updated_at') or 0.0), now)}"
    yield "launcher", f"pid {content.get('pid')} on {content.get('host')}, {told}", ""
